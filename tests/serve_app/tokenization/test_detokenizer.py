"""Streamed text equals the text of the whole, and ends before a stop string; where a growing text may be cut."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from serve_app.tokenization import segments as segmenter
from serve_app.tokenization.detokenizer import MAX_HELD_TOKENS, StopChecker
from serve_app.tokenization.segments import Segmenter, longest_token_chars
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.tokenization.variants import sentencepiece_like

ROOT = b"r" * 16


@pytest.fixture(scope="module")
def sentencepiece(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return sentencepiece_like(tmp_path_factory.mktemp("sp") / "model", demo_model_path)


def _stream(tokenizer: PromptTokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    decoder = tokenizer.decoder()
    pieces, start = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(decoder.push(ids[start : start + size]))
        start += size
    return [*pieces, decoder.flush()]


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 4100), max_size=40), sizes=st.lists(st.integers(0, 4), max_size=30))
def test_any_tokens_stream_to_the_decoding_of_the_whole(
    tokenizer: PromptTokenizer, ids: list[int], sizes: list[int]
) -> None:
    """Random ids make every kind of broken UTF-8, special and unknown tokens; the pieces still add up."""
    assert "".join(_stream(tokenizer, ids, sizes)) == tokenizer.pretrained.decode(ids, skip_special_tokens=True)


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(lambda text: "<|" not in text))
def test_no_piece_holds_half_a_character(tokenizer: PromptTokenizer, text: str) -> None:
    """Token by token, valid text never shows a replacement character of its own."""
    ids = tokenizer.encode(text, ROOT).token_ids.tolist()
    pieces = _stream(tokenizer, ids, [1] * len(ids))
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_the_held_part_does_not_grow(tokenizer: PromptTokenizer) -> None:
    """A long answer of broken UTF-8 never holds back more than the beginning of one character."""
    broken = tokenizer.pretrained.convert_tokens_to_ids("Ĥ")
    decoder = tokenizer.decoder()
    shown = 0
    for pushed in range(1, 5001):
        shown += len(decoder.push([broken]))
        assert len(decoder._utf8.getstate()[0]) <= 3
        assert pushed - shown <= 3


@settings(max_examples=200)
@given(data=st.data(), text=st.text(st.sampled_from("the fox jumps  é🌍0\n"), max_size=40))
def test_sentencepiece_like_text_streams_to_the_decoding_of_the_whole(
    sentencepiece: PromptTokenizer, data: st.DataObject, text: str
) -> None:
    """The first space is dropped as in the whole, others are kept, and characters made of bytes are whole."""
    ids = sentencepiece.encode(text + "<|im_end|>" + text, ROOT).token_ids.tolist()
    sizes = data.draw(st.lists(st.integers(0, 3), max_size=30))
    whole = sentencepiece.pretrained.decode(ids, skip_special_tokens=True)
    assert "".join(_stream(sentencepiece, ids, sizes)) == whole


def test_sentencepiece_like_garbage_is_not_held_for_ever(sentencepiece: PromptTokenizer) -> None:
    """A run of bytes that never becomes a character is shown after a bounded number of tokens."""
    broken = sentencepiece.pretrained.convert_tokens_to_ids("<0x82>")
    decoder = sentencepiece.decoder()
    pieces = [decoder.push([broken]) for _ in range(3 * MAX_HELD_TOKENS)]
    assert pieces[MAX_HELD_TOKENS - 1] == "\ufffd" * MAX_HELD_TOKENS
    assert len(decoder._released_ids) <= MAX_HELD_TOKENS


def test_only_a_possible_beginning_is_held_back() -> None:
    """Text that cannot begin a stop string is shown at once."""
    checker = StopChecker(("END", "\n\n"))
    shown = [checker.push(text) for text in ("abc", "x\nE", "N", "d", "!END?", "more")]
    assert shown == [("abc", False), ("x\n", False), ("", False), ("ENd", False), ("!", True), ("", True)]
    with pytest.raises(ValueError, match="must not be empty"):
        StopChecker(("a", ""))


WORDS = st.text("ab", min_size=1, max_size=9)
STOPS = st.lists(WORDS, max_size=5).map(tuple)


@settings(max_examples=500)
@given(pieces=st.lists(st.text("abX", max_size=4), max_size=12), stop=STOPS, early=st.integers(0, 12))
def test_a_stop_string_that_is_complete_too_early_does_not_count(
    pieces: list[str], stop: tuple[str, ...], early: int
) -> None:
    """For any cuts, the first one that ends after the first ``early`` pieces ends the text, even inside them.

    Until then exactly the longest beginning of a stop string is held back.
    """
    text, free = "".join(pieces), len("".join(pieces[:early]))
    ends = [(start + len(one), start) for one in stop for start in range(len(text)) if text.startswith(one, start)]
    found = min((end for end in ends if end[0] > free), default=None)
    for include in (False, True):
        checker = StopChecker(stop, include=include)
        shown, pushed, stopped = "", "", False
        for number, piece in enumerate(pieces):
            new, stopped = checker.push(piece, early=number < early)
            shown, pushed = shown + new, pushed + piece
            if stopped:
                break
            beginnings = {one[:length] for one in stop for length in range(len(one))} | {""}
            assert pushed == shown + max(filter(pushed.endswith, beginnings), key=len)
        assert checker.found == ("" if found is None else text[found[1] : found[0]])
        shown += checker.flush()
        assert stopped == (found is not None)
        assert shown == (text if found is None else text[: found[0] if include else found[1]])


LONG = 1024


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (("a" * LONG + "b",), "a" * 4 * LONG),
        (tuple("a" * (LONG - number) + chr(98 + number) for number in range(16)), "a" * 4 * LONG),
        (tuple(f"{number:x}." + "ab" * LONG for number in range(16)), "7.ab7." + "ab" * (LONG - 1) + "a7.ab" * LONG),
        (tuple("ab" * number + "c" for number in range(1, 400)), "ab" * 2 * LONG),
    ],
    ids=["one", "common beginnings", "of their own", "many"],
)
@pytest.mark.parametrize("step", [1, 4, LONG])
def test_a_character_costs_the_same_whatever_the_stop_strings(stop: tuple[str, ...], text: str, step: int) -> None:
    """Counted in calls, of C's functions too: the search runs in the loop of all requests."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    checker = StopChecker(stop)
    checker.push(text)  # makes the states on the way
    checker.flush()
    sys.setprofile(count)
    try:
        for at in range(0, len(text), step):
            assert not checker.push(text[at : at + step])[1]
    finally:
        sys.setprofile(None)
    assert calls <= 8 * len(text)


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
