"""Many callers of one tokenizer: they agree, wait for one tokenization, and the loop runs on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.protocol.block_hash import hash_blocks
from serve_app.tokenization.tokenizer import EncodedPrompt, PromptTokenizer
from tests.serve_app.tokenization.conversations import conversation

ROOT = b"r" * 16


def test_threads_agree(demo_model_path: Path) -> None:
    """Eight threads over one small cache all get the right answer."""
    cached = PromptTokenizer(demo_model_path, cache_bytes=30_000)
    texts = [conversation(3 + i, 1100) for i in range(6)]
    expected = [np.array(cached._tokenizer(text)["input_ids"], dtype=np.int32) for text in texts]
    hashes = [hash_blocks(ROOT, ids, 16) for ids in expected]

    def right(step: int) -> bool:
        encoded = cached.encode(texts[step % 6], ROOT)
        return np.array_equal(encoded.token_ids, expected[step % 6]) and encoded.block_hashes == hashes[step % 6]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, range(240)))
    assert cached.stats().bytes <= 30_000


def test_cold_text_is_tokenized_off_the_loop_once(tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten callers with one unknown text: one tokenization, in another thread, and ten equal answers."""
    text = conversation(40, 2500)
    threads: list[str] = []
    complete = tokenizer._complete

    def watched(*args: Any) -> EncodedPrompt:
        if args[0].missing:
            threads.append(threading.current_thread().name)
        return complete(*args)

    monkeypatch.setattr(tokenizer, "_complete", watched)

    async def ask() -> list[EncodedPrompt]:
        return await asyncio.gather(*(tokenizer.encode_async(text, ROOT, "a") for _ in range(10)))

    answers = asyncio.run(ask())
    assert len(threads) == 1
    assert threads[0].startswith("prepare")
    expected = tokenizer._tokenizer(text)["input_ids"]
    assert all(answer.token_ids.tolist() == expected for answer in answers)
    assert tokenizer._in_flight == {}


def test_a_cancelled_caller_does_not_take_the_others_down(tokenizer: PromptTokenizer) -> None:
    """The first of two callers is cancelled while its text waits for a worker; the second still gets it."""
    text = conversation(60, 2500)
    release = threading.Event()

    async def ask() -> EncodedPrompt:
        busy = [asyncio.create_task(tokenizer._workers.run("a", 1, release.wait, 10)) for _ in range(8)]
        first = asyncio.create_task(tokenizer.encode_async(text, ROOT, "a"))
        second = asyncio.create_task(tokenizer.encode_async(text, ROOT, "a"))
        await asyncio.sleep(0)
        assert len(tokenizer._in_flight) == 1
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        release.set()
        await asyncio.gather(*busy)
        return await second

    assert asyncio.run(ask()).token_ids.tolist() == tokenizer._tokenizer(text)["input_ids"]
