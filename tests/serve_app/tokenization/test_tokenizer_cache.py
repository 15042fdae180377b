"""The tokenizer's cache is bounded, separate for each root, and fills once for concurrent callers."""

import asyncio
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import hash_blocks
from serve_app.tokenization.segments import ENTRY_BYTES, PublicTokens, SegmentCache, TokenizedSegment
from serve_app.tokenization.tokenizer import EncodedPrompt, PromptTokenizer
from tests.harness.eventually import let_others_run
from tests.serve_app.tokenization.variants import conversation

ROOT, OTHER_ROOT = b"r" * 16, b"o" * 16


@pytest.fixture
def cold(demo_model_path: Path) -> PromptTokenizer:
    """Return a tokenizer with an empty cache."""
    return PromptTokenizer(demo_model_path)


def test_only_new_text_is_tokenized_and_nothing_is_shared_across_roots(
    cold: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer conversation has one new segment; in another scope the whole text is unknown."""
    history = conversation(20, 1500)
    segments = cold.stats().entries + len(cold._segmenter.cut(history.encode()))
    for root, text, hits, misses in (
        (ROOT, history, 0, segments),
        (ROOT, history + "<|im_start|>user\nnew<|im_end|>\n", segments - 1, 1),
        (OTHER_ROOT, history, 0, segments),
    ):
        before = cold.stats()
        ids = cold.encode(text, root).token_ids
        after = cold.stats()
        assert (after.hits - before.hits, after.misses - before.misses) == (hits, misses)
        kept = ids.tolist()
        ids[:] = 0
        assert cold.encode(text, root).token_ids.tolist() == kept, "a result belongs to its caller"
    known = cold.encode(history, ROOT)
    monkeypatch.setattr(cold, "_backend", None)
    monkeypatch.setattr("serve_app.tokenization.tokenizer.next_hashes", None)
    assert cold.encode(history, ROOT).block_hashes == known.block_hashes, "known segments are not hashed"


@pytest.mark.parametrize(("texts", "turns", "chars"), [(3000, 1, 3), (150, 2, 4000)])
def test_charged_bytes_equal_allocated_ones(demo_model_path: Path, texts: int, turns: int, chars: int) -> None:
    """For tiny and large entries, charged bytes are within a fifth of those of Python's allocator."""
    cached = PromptTokenizer(demo_model_path, cache_bytes=100 << 20)
    conversations = [f"{i} {conversation(turns, chars)}" for i in range(texts)]
    cached.encode(conversations[0], OTHER_ROOT)
    tracemalloc.start()
    for text in conversations:
        cached.encode(text, ROOT)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 < cached.stats().bytes / taken < 1.2


def test_threads_agree(demo_model_path: Path) -> None:
    """Eight threads over one small cache all get the right answer."""
    cached = PromptTokenizer(demo_model_path, cache_bytes=30_000, block_size=16)
    texts = [conversation(3 + i, 1100) for i in range(6)]
    expected = [np.array(cached.pretrained(text)["input_ids"], dtype=np.int32) for text in texts]
    hashes = [hash_blocks(ROOT, ids, 16) for ids in expected]

    def right(step: int) -> bool:
        encoded = cached.encode(texts[step % 6], ROOT)
        return np.array_equal(encoded.token_ids, expected[step % 6]) and encoded.block_hashes == hashes[step % 6]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, range(240)))
    assert cached.stats().bytes <= 30_000


def test_cold_text_is_tokenized_off_the_loop_once(cold: PromptTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten callers with one unknown text cause one tokenization, in another thread, and get equal answers."""
    text = conversation(40, 2500)
    threads: list[str] = []
    complete = cold._complete

    def watched(*args: Any) -> EncodedPrompt:
        if args[0].missing:
            threads.append(threading.current_thread().name)
        return complete(*args)

    monkeypatch.setattr(cold, "_complete", watched)

    async def ask() -> list[EncodedPrompt]:
        return await asyncio.gather(*(cold.encode_async(text, ROOT, "a") for _ in range(10)))

    answers = asyncio.run(ask())
    assert len(threads) == 1
    assert threads[0].startswith("prepare")
    expected = cold.pretrained(text)["input_ids"]
    assert all(answer.token_ids.tolist() == expected for answer in answers)
    assert cold._in_flight == {}


def test_a_cancelled_caller_does_not_take_the_others_down(cold: PromptTokenizer) -> None:
    """The first of two callers is cancelled while its text waits for a worker; the second still gets it."""
    text = conversation(60, 2500)
    release = threading.Event()

    async def ask() -> EncodedPrompt:
        busy = [asyncio.create_task(cold._workers.run("a", 1, release.wait, 10)) for _ in range(8)]
        first = asyncio.create_task(cold.encode_async(text, ROOT, "a"))
        second = asyncio.create_task(cold.encode_async(text, ROOT, "a"))
        await let_others_run()
        assert len(cold._in_flight) == 1
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        release.set()
        await asyncio.gather(*busy)
        return await second

    assert asyncio.run(ask()).token_ids.tolist() == cold.pretrained(text)["input_ids"]


KEYS = [bytes([i]) for i in range(4)]
STEPS = st.tuples(
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True),
    st.none() | st.tuples(st.integers(0, 200), st.integers(0, 20)),
)


@given(steps=st.lists(STEPS, max_size=40), capacity=st.sampled_from([0, 500, 3000, 9000]))
def test_it_charges_the_sum_and_evicts_in_order_of_use(
    steps: list[tuple[list[bytes], tuple[int, int] | None]], capacity: int
) -> None:
    """The model is a list in order of use: puts replace; a look-up moves hits to the end, the first segment last."""
    cache = SegmentCache(capacity)
    model: list[tuple[bytes, TokenizedSegment]] = []
    hits = misses = 0

    def charged() -> int:
        return sum(ENTRY_BYTES + 4 * len(segment.ids) + len(segment.block_hashes) for _, segment in model)

    for keys, size in steps:
        held = dict(model)
        if size is None:
            assert cache.get(keys) == [held.get(key) for key in keys]
            found = [(key, held[key]) for key in reversed(keys) if key in held]
            hits, misses = hits + len(found), misses + len(keys) - len(found)
            model = [pair for pair in model if pair[0] not in keys] + found
        else:
            segment = TokenizedSegment(np.zeros(size[0], dtype=np.int32), bytes(16 * size[1]))
            cache.put((key, segment) for key in keys)
            for key in keys if segment.charge <= capacity else ():
                model = [pair for pair in model if pair[0] != key] + [(key, segment)]
                while charged() > capacity:
                    model.pop(0)
        stats = cache.stats()
        assert stats.bytes == charged() <= capacity
        assert (stats.entries, stats.hits, stats.misses) == (len(model), hits, misses)
        assert list(cache._segments) == [key for key, _ in model], "in order of eviction"


IDS = st.lists(st.one_of(st.integers(0, 2), st.sampled_from([255, 256, 70000])), max_size=9)


def naive(prompts: list[list[int]], ids: list[int]) -> int:
    best = 0
    for prompt in prompts:
        for length in range(min(len(prompt), len(ids)) + 1):
            if prompt[:length] == ids[:length]:
                best = max(best, length)
    return best


@given(st.lists(IDS, max_size=6), st.lists(IDS, min_size=1, max_size=4))
def test_the_longest_public_beginning_is_found(prompts: list[list[int]], asked: list[list[int]]) -> None:
    """Prompts may be empty, equal, or one inside another."""
    index = PublicTokens(np.array(prompt, dtype=np.int32) for prompt in prompts)
    for ids in [*asked, *([*prompt, 1] for prompt in prompts)]:
        assert index.count(np.array(ids, dtype=np.int32)) == naive(prompts, ids)
