"""Where a text is cut: at the same places whether the search skips ahead or looks at every added token."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from serve_app.tokenization import segmenter as segments
from serve_app.tokenization.segmenter import Segmenter

PIECES = ["<a>", "<b>", "<a><b>", "><", "<|", "|>", "a", "bb", " ", "<", ">", "é"]


def segmenter(tokens: list[str]) -> Segmenter:
    tokenizer = Tokenizer(BPE({"a": 0, "b": 1}, []))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    return Segmenter(tokenizer)


def plain_cut(tokens: list[str], raw: bytes, least: int) -> list[int]:
    """The rule as it is said: at the first added token, of those found from the left, after ``least`` bytes."""
    contents = sorted(tokens, key=lambda token: (-len(token), token))
    ends, earliest = [], least
    for match in re.finditer(b"|".join(re.escape(content.encode()) for content in contents), raw):
        if match.start() >= earliest:
            ends.append(match.start())
            earliest = match.start() + least
    return [*ends, len(raw)] if raw else ends


@given(
    tokens=st.lists(st.sampled_from(PIECES[:6]), min_size=1, max_size=4, unique=True),
    parts=st.lists(st.sampled_from(PIECES), max_size=60),
    least=st.integers(1, 12),
)
@settings(max_examples=300)
def test_a_text_is_cut_by_the_rule(tokens: list[str], parts: list[str], least: int) -> None:
    """Also where one added token may begin inside another, so that no search may begin in the middle."""
    made = segmenter(tokens)
    raw = "".join(parts).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "MIN_SEGMENT_BYTES", least)
        assert made.cut(raw) == (plain_cut(tokens, raw, least) if made.exact else [len(raw)] * bool(raw))
