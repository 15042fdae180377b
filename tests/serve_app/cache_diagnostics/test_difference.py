"""The first difference, its class, and what is equal behind it."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.cache_diagnostics.difference import GRAM, classify, equal_behind, first_difference, grams, value_there

ids = st.lists(st.integers(0, 5), max_size=40)


@given(st.text("ab", max_size=30), st.text("ab", max_size=30))
def test_the_first_difference_is_where_a_naive_scan_finds_it(new: str, old: str) -> None:
    """Character by character."""
    naive = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(new, old, strict=False)))
    assert first_difference(new, old) == naive


@given(ids, ids)
def test_hashes_are_equal_where_tokens_are(one: list[int], other: list[int]) -> None:
    """A gram's hash says which tokens it has, at any place."""
    first, second = (grams(np.array(each, dtype=np.int32)) for each in (one, other))
    for left, a in enumerate(first):
        for right, b in enumerate(second):
            assert (a == b) == (one[left : left + GRAM] == other[right : right + GRAM])


@given(
    st.lists(st.integers(100, 10_000), unique=True, min_size=GRAM, max_size=60), st.integers(0, 40), st.integers(0, 40)
)
def test_what_follows_a_difference_is_counted_whatever_its_length(same: list[int], new: int, old: int) -> None:
    """Two prompts differ in parts of any lengths, and then go on alike: all of that counts, and nothing else."""
    prompts = [np.array([1, 2, *[kind] * length, *same], dtype=np.int32) for kind, length in ((3, new), (4, old))]
    assert equal_behind(prompts[0], prompts[1], 2) == len(same)
    assert equal_behind(prompts[0], np.array([1, 2, 4, 4], dtype=np.int32), 2) == 0


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("Today is 2026-11-21.", "Today is 2026-11-22.", "date"),
        ("2026-11-21T10:00:00Z go", "2026-11-21T10:00:01Z go", "time"),
        ("a  b and so on", "a b and so on", "whitespace"),
        ('x {"a": 1, "b": [2, 3]} y', 'x {"b": [2, 3], "a": 1} y', "reordered"),
        ("- one\n- two\nend", "- two\n- one\nend", "reordered"),
        ('x {"a": 1, "b": 2} y', 'x {"a": 2, "b": 3} y', "text"),
        ("Turn 3:", "Turn 4:", "counter"),
        ("Use v1.2.3", "Use v1.2.4", "text"),
        ("t=1763800000 x", "t=1763800001 x", "epoch"),
    ],
)
def test_classes(old: str, new: str, reason: str) -> None:
    """One of each."""
    assert classify(new, old, first_difference(new, old)) == reason


@pytest.mark.parametrize("depth", [40, 400, 4000])
def test_deep_json_is_compared_in_bounded_time(depth: int) -> None:
    """Nor does it raise: what is too deep is no JSON value for the comparison."""
    old, new = ("[" * depth + f'"{word}", {{"a": 1, "b": 2}}' + "]" * depth for word in ("one", "two"))
    assert classify(new, old, first_difference(new, old)) == "text"


def test_what_stands_there_is_shown_as_a_whole() -> None:
    """The whole value, though its last digit alone differs; of a long word the beginning."""
    text = "Today is 2026-11-22."
    assert value_there(text, text.index("22")) == "2026-11-22"
    assert len(value_there("x" * 500, 3)) == 64 and value_there("", 0) == ""
