"""Fields that nothing reads are named, in words that a header may hold, or refused as OpenAI refuses them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.unknown import MAX_TOLD, UnknownField, ignored_fields, require_none, unknown_fields
from serve_app.errors import InvalidRequest

KNOWN = ("cache_salt", "max_tokens", "temperature")


@given(st.lists(st.text(max_size=200), max_size=20))
def test_whatever_a_client_writes_a_header_can_hold_it(names: list[str]) -> None:
    """Line ends would be other headers, and a thousand names no header at all."""
    told = ignored_fields(unknown_fields(names, KNOWN))
    assert told.isascii() and (told.isprintable() or not told)
    assert len(told) < 100 * (MAX_TOLD + 1)
    assert bool(told) == bool(names)


def test_a_misspelt_name_is_told_with_the_one_that_is_meant() -> None:
    assert unknown_fields(["cache_slat", "sparkle"], KNOWN) == (
        UnknownField("cache_slat", "cache_salt"),
        UnknownField("sparkle"),
    )
    found = unknown_fields(["cache_slat", "sparkle"], KNOWN)
    assert ignored_fields(found) == "unknown fields ignored: cache_slat (did you mean cache_salt?), sparkle"


def test_the_first_is_refused_in_openais_words() -> None:
    require_none(())
    with pytest.raises(InvalidRequest) as caught:
        require_none(unknown_fields(["sparkle", "cache_slat"], KNOWN))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "sparkle", "unknown_parameter")
    assert caught.value.message == "Unknown parameter: 'sparkle'; leave it out."
    with pytest.raises(InvalidRequest, match="did you mean 'cache_salt'"):
        require_none(unknown_fields(["cache_slat"], KNOWN))
