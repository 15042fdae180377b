"""Keys of an adapter's patterns mean what PEFT takes them for, or are refused; none takes long to match."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from serve_app.engine.lora.module_pattern import module_pattern
from serve_app.engine.protocol import AdapterError

Q = "model.layers.10.self_attn.q_proj"

PIECES = ["a", "b", ".", ".", "\\.", ".*", "[ab]", "[a-c]", "-", "\\-", "\\d", "1"]
KEYS = st.builds(
    lambda start, body, end: start + body + end,
    st.sampled_from(["", "^"]),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join),
    st.sampled_from(["", "$"]),
)


def understood(key: str) -> bool:
    try:
        module_pattern(key)
    except AdapterError:
        return False
    return True


@given(key=KEYS, module=st.text("ab.1-", min_size=1, max_size=12))
def test_what_is_understood_matches_as_in_peft(key: str, module: str) -> None:
    """Whatever else is refused. (PEFT returns the key where it matches, and the module's name otherwise.)"""
    if not understood(key):
        assert "\\.*" in key, "a dot any number of times is no name"
    elif key != module:
        assert bool(module_pattern(key).match(module)) == (get_pattern_key([key], module) == key)


@pytest.mark.parametrize(
    "key",
    [
        "q_proj",
        "self_attn.q_proj",
        Q,
        f"^{Q}",
        re.escape(Q),
        rf".*\.{re.escape('q_proj')}",
        r"layers\.[0-9]\d\..*_proj$",
        ".*attn.*",
        "model.layers.1[0-5].self_attn.q_proj",
    ],
)
def test_keys_that_peft_and_people_write_are_understood(key: str) -> None:
    assert module_pattern(key).match(Q)
    assert not module_pattern(key).match("model.layers.9.mlp.up_proj2")


@pytest.mark.parametrize(
    "key",
    ["(.*)*x", "(a|a)(a|a)", "q|k", "a+", "a?", "a{9}", r"\w", r"\.*", "a**", "[^a]", "[b-a]", "[]", "(?=a)", "^", "",
     "é", "a\n", "a" * 257],
)  # fmt: skip
def test_what_is_not_understood_is_refused(key: str) -> None:
    """Much of it is harmless, but any of it could be written so that a match never ends. (docs/lora.md)"""
    assert not understood(key)


@pytest.mark.parametrize("key", [".*a" * 80, "a.*" * 80 + "b", ".*.*" * 60 + "b", "[ab]" + ".*" * 100 + "c"])
def test_a_match_always_ends(key: str) -> None:
    """Each of these would take Python's own matching of the same key longer than the universe is old."""
    assert not module_pattern(key).match("a." * 60 + "x")
