"""The first difference, its class, and the equal part after it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.cache_diagnostics.difference import classify, value_there
from serve_app.cache_diagnostics.explain import GRAM, equal_behind
from serve_app.prompts.lock import first_difference


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_the_first_difference(one: bytes, other: bytes) -> None:
    """Everything before it is equal, and at it something differs or ends, unless both texts are the same."""
    at = first_difference(one, other)
    assert one[:at] == other[:at]
    assert one == other if at == max(len(one), len(other)) else one[at : at + 1] != other[at : at + 1]


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40), st.integers(0, 5))
def test_the_equal_part_behind_agrees_with_a_naive_search(new: list[int], old: list[int], start: int) -> None:
    """It counts runs of eight tokens that the other prompt also has, anywhere after the difference."""
    known = {tuple(old[at : at + GRAM]) for at in range(start, len(old) - GRAM + 1)}
    covered: set[int] = set()
    for at in range(start, len(new) - GRAM + 1):
        if tuple(new[at : at + GRAM]) in known:
            covered.update(range(at, at + GRAM))
    assert equal_behind(np.array(new, dtype=np.int32), np.array(old, dtype=np.int32), start) == len(covered)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("Today is 2026-11-21.", "Today is 2026-11-22.", "time"),
        ("It is Mon, 21 November 2026 now", "It is Tue, 22 November 2026 now", "time"),
        ("2026-11-21T10:00:00Z go", "2026-11-21T10:00:01Z go", "time"),
        ("t=1763800000 x", "t=1763800001 x", "time"),
        ("Turn 3:", "Turn 4:", "id"),
        ("as 6f1c1d1e-0d5f-4c3e-9a53-0a5b8a2a9c11.", "as 6f1c1d1e-0d5f-4c3e-9a53-0a5b8a2a9c12.", "id"),
        ("a  b and so on", "a b and so on", "whitespace"),
        ('x {"a": 1, "b": [2, 3]} y', 'x {"b": [2, 3], "a": 1} y', "reordered"),
        ("- one\n- two\nend", "- two\n- one\nend", "reordered"),
        ('x {"a": "one", "b": "two"} y', 'x {"a": "two", "b": "three"} y', "text"),
        ("Use v1.2.3", "Use v1.2.4", "text"),
        ("It costs $4.90.", "It costs $4.95.", "text"),
        *((f'{"[" * depth}"one"{"]" * depth}', f'{"[" * depth}"two"{"]" * depth}', "text") for depth in (40, 4000)),
    ],
)  # fmt: skip
def test_classes(old: str, new: str, reason: str) -> None:
    """A text that only resembles a date, an id or another order is text."""
    assert classify(new, old, first_difference(new, old)) == reason


def test_the_value_there_is_shown_as_a_whole() -> None:
    """A value is shown whole, though only its last digit differs; a long word is cut."""
    text = "Today is 2026-11-22."
    assert value_there(text, text.index("22")) == "2026-11-22"
    assert len(value_there("x" * 500, 3)) == 64 and value_there("", 0) == ""
