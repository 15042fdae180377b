"""Cuts of a text before added tokens, which stay when it grows, and lower bounds for its number of tokens."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from serve_app.tokenization import segmenter
from serve_app.tokenization.segmenter import Segmenter, longest_token_chars

PIECES = ["<a>", "<b>", "<a><b>", "><", "<|", "|>", "a", "bb", " ", "<", ">", "é"]


@given(
    added=st.lists(st.sampled_from(PIECES[:6]), min_size=1, max_size=4, unique=True),
    parts=st.lists(st.sampled_from(PIECES), max_size=60),
    least=st.integers(1, 12),
)
def test_a_text_is_cut_by_the_rule(added: list[str], parts: list[str], least: int) -> None:
    """This includes added tokens that may begin inside one another."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
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


def by_bytes(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path / "tokenizer.json"))


TEXTS = st.lists(
    st.one_of(
        st.text(max_size=20), st.sampled_from(["<|im_start|>", " " * 40, "\u1112\u1161\u11ab" * 9, "e\u0301" * 9])
    ),
    max_size=8,
).map("".join)


@given(text=TEXTS, composed=st.booleans())
def test_no_text_has_fewer_tokens(demo_model_path: Path, text: str, composed: bool) -> None:
    """For byte-level BPE, with and without NFC: Hangul and accents shrink by composing. (docs: routing)"""
    tokenizer = by_bytes(demo_model_path)
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    longest = longest_token_chars(tokenizer)
    assert longest == (4 if composed else 1) * max(map(len, tokenizer.get_vocab(with_added_tokens=True)))
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) * longest >= len(text)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])},
        {"normalizer": normalizers.NFKC()},
        {"normalizer": normalizers.Replace("     ", " ")},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])},
        {"model": models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")},
        {},
    ],
    ids=["strip", "compatible", "shrink", "removed", "words", "rstrip"],
)
def test_where_nothing_is_known_nothing_is_claimed(demo_model_path: Path, change: dict[str, Any]) -> None:
    """With words, stripping, removed text or tokens that swallow blanks, any length can become one token, or none."""
    tokenizer = by_bytes(demo_model_path)
    for name, component in change.items():
        setattr(tokenizer, name, component)
    if not change:
        tokenizer.add_special_tokens([AddedToken("<|greedy|>", rstrip=True)])
    assert longest_token_chars(tokenizer) is None


@pytest.mark.parametrize("fallback", [True, False])
def test_byte_fallback_bounds_a_sentencepiece_model(fallback: bool) -> None:
    """Without it an unknown character is one token, or none, and neighbours may be fused."""
    bytes_ = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE({**bytes_, "▁": 256, "a": 257}, [], byte_fallback=fallback))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.ByteFallback()
    assert longest_token_chars(tokenizer) == (6 if fallback else None)
