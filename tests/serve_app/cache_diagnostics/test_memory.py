"""What is remembered is bounded, and each tenant's is its own."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from router.protocol.block_hash import PrefixScope
from serve_app.cache_diagnostics.memory import (
    FAMILY_PROMPTS,
    MAX_FAMILIES,
    MAX_PROMPT_TOKENS,
    MAX_TENANT_BYTES,
    PromptMemory,
    SeenPrompt,
    TenantMemory,
)

SCOPE = PrefixScope("m", "", b"")


def prompt(tokens: int) -> SeenPrompt:
    return SeenPrompt(np.zeros(tokens, dtype=np.int32), SCOPE, 0, 0.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5000)), max_size=120), st.integers(1000, 200_000))
def test_a_tenants_memory_stays_within_its_bytes(added: list[tuple[int, int]], max_bytes: int) -> None:
    """After each prompt what is remembered is within the bounds of bytes, prompts and families."""
    memory = TenantMemory()
    for family, tokens in added:
        memory.add(b"%d" % family, prompt(tokens), max_bytes)
        assert sum(seen.bytes for seen in memory.prompts()) <= max_bytes
        assert len(memory.prompts()) <= FAMILY_PROMPTS * MAX_FAMILIES


def test_a_long_prompt_is_kept_in_part_and_keeps_no_more_alive() -> None:
    """Its first tokens, copied."""
    long = prompt(MAX_PROMPT_TOKENS + 1)
    assert len(long.ids) == MAX_PROMPT_TOKENS and long.ids.base is None
    assert long.bytes < MAX_TENANT_BYTES


def test_the_room_of_a_tenant_does_not_depend_on_what_others_send() -> None:
    """One tenant fills its own room over and over; another's prompt stays. (docs/caching.md)"""
    memory = PromptMemory(lambda: 2)
    memory.add("b", b"f", prompt(1000))
    for number in range(500):
        memory.add("a", b"%d" % number, prompt(20_000))
    assert len(memory.prompts("b")) == 1
    assert sum(seen.bytes for seen in memory.prompts("a")) <= MAX_TENANT_BYTES
    memory.add("c", b"f", prompt(10))
    assert not memory.prompts("b")  # the settings have two tenants: the third came in the place of one
