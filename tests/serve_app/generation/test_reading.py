"""Text, tokens and what is told of them are the same however many tokens come at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.api.format import ToldToken
from serve_app.engine.protocol import SamplingParams, TokenLogprob, TokenRules
from serve_app.generation.answer import ChoiceReader
from serve_app.generation.generation import Tokens
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.generation.fake_replicas import generation


@pytest.fixture(scope="module")
def tokenizer(demo_model_path: Path) -> PromptTokenizer:
    return PromptTokenizer(demo_model_path)


def read(
    tokenizer: PromptTokenizer, ids: list[int], sizes: list[int], stop: tuple[str, ...], sampling: SamplingParams
) -> tuple[str, int, list[ToldToken]]:
    """Read ids in chunks; return the text, how many were read, and what was told."""
    reader = ChoiceReader(0, replace(generation(), sampling=sampling), tokenizer.decoder(), stop)
    text, read_ids, told, start = "", 0, [], 0
    for size in [*sizes, len(ids)]:
        chunk = tuple(ids[start : start + size])
        start += size
        logprobs = tuple(TokenLogprob(-float(token), ((token, -1.0),)) for token in chunk if sampling.logprobs)
        (piece,) = reader.read(Tokens(chunk, None, "length" if start >= len(ids) else None, logprobs=logprobs))
        text, read_ids = text + piece.text, read_ids + piece.new_tokens
        told.extend(piece.logprobs)
        assert all(one.offset <= len(text) for one in piece.logprobs), "no token is told before its text"
        if piece.finish_reason is not None:
            assert bool(piece.stop_sequence) == (piece.finish_reason == "stop")
            break
    return text, read_ids, told


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(3, 4095), min_size=1, max_size=25),
    sizes=st.lists(st.integers(1, 5), max_size=25),
    cut=st.integers(0, 40),
    min_tokens=st.integers(0, 8),
    data=st.data(),
)
def test_chunks_change_nothing(
    tokenizer: PromptTokenizer, ids: list[int], sizes: list[int], cut: int, min_tokens: int, data: Any
) -> None:
    """Offsets are where tokens begin in the text; a stop string takes its tokens with it."""
    whole = tokenizer.decode(ids)
    stop = (whole[cut : cut + 2],) if data.draw(st.booleans()) and len(whole) >= cut + 2 else ()
    sampling = SamplingParams(99, logprobs=1, rules=TokenRules(min_tokens=min_tokens) if min_tokens else None)
    text, read_ids, told = read(tokenizer, ids, [], stop, sampling)
    assert read(tokenizer, ids, sizes, stop, sampling) == (text, read_ids, told)
    silent = SamplingParams(99, rules=sampling.rules)
    assert read(tokenizer, ids, sizes, stop, silent) == (text, read_ids, [])
    decoder, offset, offsets = tokenizer.decoder(), 0, []
    for token in ids:
        offsets.append(offset)
        offset += len(decoder.push((token,)))
    if len(text) == len(whole):
        assert text == whole
    if read_ids == len(ids) and text == whole:
        assert [one.offset for one in told] == offsets
        assert b"".join(one.token.raw for one in told).decode(errors="replace") == whole
    else:
        assert whole.startswith(text)
        assert [one.offset for one in told] == [offset for offset in offsets[:read_ids] if offset < len(text)]
    assert [one.token.logprob for one in told] == [-float(token) for token in ids[: len(told)]]


def test_a_tokens_bytes_are_shown_in_every_vocabulary(tokenizer: PromptTokenizer) -> None:
    """Special tokens by their name, unknown ids as nothing."""
    decoder = tokenizer.decoder()
    assert decoder.shown_bytes(2) == b"<|im_end|>"
    assert decoder.shown_bytes(10**6) == b""
