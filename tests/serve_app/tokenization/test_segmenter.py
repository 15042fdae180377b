"""Where a text is cut: before added tokens, not too often, and at the same places when it grows."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from serve_app.tokenization import segmenter
from serve_app.tokenization.segmenter import Segmenter

PIECES = ["<a>", "<b>", "<a><b>", "><", "<|", "|>", "a", "bb", " ", "<", ">", "é"]


@given(
    added=st.lists(st.sampled_from(PIECES[:6]), min_size=1, max_size=4, unique=True),
    parts=st.lists(st.sampled_from(PIECES), max_size=60),
    least=st.integers(1, 12),
)
def test_a_text_is_cut_by_the_rule(added: list[str], parts: list[str], least: int) -> None:
    """Also where one added token may begin inside another."""
    tokenizer = Tokenizer(BPE({"a": 0, "b": 1}, []))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in added])
    cutter, raw = Segmenter(tokenizer), "".join(parts).encode()
    longest_first = sorted(added, key=len, reverse=True)
    starts = [m.start() for m in re.finditer("|".join(map(re.escape, longest_first)).encode(), raw)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segmenter, "MIN_SEGMENT_BYTES", least)
        *cuts, end = cutter.cut(raw) or [0]
        assert end == len(raw)
        assert cutter.cut(raw + b"<a> and more")[: len(cuts)] == cuts
        assert set(cuts) <= set(starts if cutter.exact else ())
        for before, cut in zip([0, *cuts], [*cuts, None], strict=True):
            due = [start for start in starts if start >= before + least] if cutter.exact else []
            assert cut == (due[0] if due else None)
