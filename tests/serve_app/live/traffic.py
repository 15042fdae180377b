"""Generations with prompts of numbered blocks, as the dispatcher records them, and tables filled with many."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from router.protocol.block_hash import PrefixScope, extend_chain
from router.protocol.request import Decision
from serve_app.engine.protocol import EngineRequest, SamplingParams
from serve_app.live.live import Live
from serve_app.live.prefixes import Answered, PrefixTable

BLOCK = 4


def chain_of(tenant: str, blocks: Sequence[int], public_blocks: int = 0) -> bytes:
    """Return the hashes of a tenant's prompt of numbered blocks."""
    own = PrefixScope("m", "", tenant.encode()).root(b"secret")
    root = PrefixScope("m").root(b"secret") + own if public_blocks else own
    ids = np.repeat(np.asarray(blocks, dtype=np.int32), BLOCK)
    return extend_chain(root, public_blocks, ids, BLOCK)


def generation(
    tenant: str, blocks: Sequence[int], public_blocks: int = 0, system_blocks: int = 0, ref: str = "", number: int = 0
) -> EngineRequest:
    """Return a generation with a prompt of these blocks and one more token."""
    ids = np.append(np.repeat(np.asarray(blocks, dtype=np.int32), BLOCK), 1).astype(np.int32)
    return EngineRequest(
        request_id=f"{tenant}-{number}.0",
        token_ids=ids,
        block_hashes=chain_of(tenant, blocks, public_blocks),
        scope=PrefixScope("m", "", tenant.encode(), public_blocks),
        root=b"r" * 16,
        placement_key=b"k" * 16,
        tenant=tenant,
        sampling=SamplingParams(max_tokens=4),
        prompt_ref=ref,
        system_tokens=system_blocks * BLOCK,
    )


def decision(replica: str = "r1", cached_tokens: int = 0) -> Decision:
    return Decision(replica, "router", 1, cached_tokens, cached_tokens, "cached", 0.125, queued_tokens=7)


def answered(tenant: str, chain: bytes, prompt_tokens: int, cached_tokens: int, **more: Any) -> Answered:
    """Return a request in the form for the table of prefixes. Its decision does not matter."""
    return Answered("r", tenant, chain, prompt_tokens, cached_tokens, 0.1, decision(), **more)


def is_idle(live: Live) -> bool:
    """Return whether nothing runs, and nothing but the table is kept."""
    return live._task is None and not live._views and not live._kept


class Use(NamedTuple):
    """One of many generations. ``blocks``: of its prompt. The first ones are public, or belong to the system prompt."""

    at_s: int
    tenant: str
    blocks: list[int]
    public_blocks: int
    system_blocks: int
    cached_tokens: int


Uses = list[Use]
USES = st.lists(
    st.builds(
        Use,
        st.just(0),
        st.sampled_from(["a", "b"]),
        st.lists(st.integers(0, 2), max_size=9),
        st.integers(0, 3),
        st.integers(0, 5),
        st.integers(0, 40),
    ),
    max_size=24,
).map(lambda uses: [use._replace(at_s=at_s) for at_s, use in enumerate(uses)])


def filled(uses: Sequence[Use]) -> PrefixTable:
    table = PrefixTable(BLOCK, lambda: 2)
    for use in uses:
        blocks, public_blocks = len(use.blocks), min(use.public_blocks, len(use.blocks))
        told = answered(
            use.tenant,
            chain_of(use.tenant, use.blocks, public_blocks),
            blocks * BLOCK + 1,
            use.cached_tokens,
            public_blocks=public_blocks,
            system_tokens=min(use.system_blocks, blocks) * BLOCK,
        )
        table.add(told, float(use.at_s))
    return table
