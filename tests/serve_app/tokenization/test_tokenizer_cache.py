"""What the tokenizer remembers: within its bound, for its own root alone, and right however it was evicted."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.tokenization.conversations import conversation

ROOT, OTHER_ROOT = b"r" * 16, b"o" * 16


def test_only_what_is_new_is_tokenized_and_nothing_is_shared_across_roots(tokenizer: PromptTokenizer) -> None:
    """Of a grown conversation one segment is new; to another scope the whole is as unknown as any other text."""
    history = conversation(20, 1500)
    segments = tokenizer.stats().entries + len(tokenizer._segmenter.cut(history.encode()))
    for root, text, hits, misses in (
        (ROOT, history, 0, segments),
        (ROOT, history + "<|im_start|>user\nnew<|im_end|>\n", segments - 1, 1),
        (OTHER_ROOT, history, 0, segments),
    ):
        before = tokenizer.stats()
        ids = tokenizer.encode(text, root).token_ids
        after = tokenizer.stats()
        assert (after.hits - before.hits, after.misses - before.misses) == (hits, misses)
        kept = ids.tolist()
        ids[:] = 0
        assert tokenizer.encode(text, root).token_ids.tolist() == kept, "a result belongs to its caller"


def test_the_cache_stays_in_its_bound(demo_model_path: Path) -> None:
    """Charged bytes never pass the bound and use it; a text over the bound leaves the rest in place."""
    bounded = PromptTokenizer(demo_model_path, cache_bytes=200_000)
    for i in range(150):
        bounded.encode(conversation(2, 1000 + 37 * i), ROOT)
        assert bounded.stats().bytes <= 200_000
    entries = bounded.stats().entries
    assert bounded.stats().bytes > 150_000
    bounded.encode("x y" * 100_000, ROOT)
    assert entries <= bounded.stats().entries <= entries + 1
    assert bounded.stats().bytes <= 200_000


@pytest.mark.parametrize(("texts", "turns", "chars"), [(3000, 1, 3), (150, 2, 4000)])
def test_what_is_charged_is_what_is_taken(demo_model_path: Path, texts: int, turns: int, chars: int) -> None:
    """For tiny entries and for large ones, charged bytes are within a fifth of what Python's allocator says."""
    cached = PromptTokenizer(demo_model_path, cache_bytes=100 << 20)
    conversations = [f"{i} {conversation(turns, chars)}" for i in range(texts)]
    cached.encode(conversations[0], OTHER_ROOT)
    tracemalloc.start()
    for text in conversations:
        cached.encode(text, ROOT)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 < cached.stats().bytes / taken < 1.2


def test_of_a_known_conversation_nothing_is_tokenized_or_hashed(
    demo_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What 100,000 tokens cost the second time is looking them up."""
    cached = PromptTokenizer(demo_model_path, cache_bytes=64 << 20)
    text = conversation(100, 1700)
    first = cached.encode(text, ROOT)
    assert len(first.token_ids) > 100_000
    monkeypatch.setattr(cached, "_backend", None)
    monkeypatch.setattr("serve_app.tokenization.tokenizer.next_hashes", None)
    again = cached.encode(text, ROOT)
    assert again.block_hashes == first.block_hashes
    assert np.array_equal(again.token_ids, first.token_ids)
