"""The real scheduler over the real cache, in virtual time: steps always succeed and take tokens / RATE."""

import numpy as np
from msgspec import structs

from router.protocol.block_hash import HASH_BYTES, PrefixScope
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.scheduling.scheduler import Scheduled, Scheduler
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings
from tests.serve_app.engine.tiny import SCOPE, request

RATE = 5000.0
"""Tokens per virtual second."""


def assert_laws(sequence: SequenceState, block_size: int) -> None:
    prompt, most = sequence.prompt_tokens, sequence.prompt_tokens + sequence.request.sampling.max_tokens
    assert prompt <= sequence.prefill_tokens <= sequence.length <= most
    assert 0 <= sequence.computed <= sequence.length
    assert sequence.farthest <= sequence.length
    assert 0 <= sequence.published <= sequence.computed // block_size <= len(sequence.blocks)
    assert 0 <= sequence.resolved <= sequence.computed // block_size
    assert sequence.cached_blocks_hint <= len(sequence.chain) // HASH_BYTES, "a hint beyond the chain"
    assert sequence.reserved_blocks >= 0, "fewer than no blocks are reserved"
    if not sequence.blocks:
        assert sequence.computed == sequence.reserved_blocks == 0, "KV or a reservation without blocks"
        assert not sequence.beyond_reservation, "beyond a reservation without blocks"


class Bench:
    """``tenants``: with equal shares. ``started_s``: the time of each request's first step."""

    def __init__(self, *tenants: str, **overrides: object) -> None:
        values: dict[str, object] = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, **overrides}
        shares = dict.fromkeys(tenants, 1.0)
        self.now_s = 0.0
        self.settings = EngineSettings(tenant_shares=shares, **values)  # type: ignore[arg-type]
        self.cache = PrefixCache(self.settings.num_blocks, 16, shares=shares, clock=lambda: self.now_s)
        self.scheduler = Scheduler(self.settings, self.cache)
        self.started_s: dict[str, float] = {}

    def add(
        self,
        name: str,
        ids: np.ndarray,
        max_tokens: int = 4,
        *,
        tenant: str = "default",
        arrival_s: float | None = None,
        store_kv: bool = True,
        order: int = 0,
        scope: PrefixScope = SCOPE,
    ) -> SequenceState:
        item = structs.replace(
            request(name, ids, max_tokens, tenant=tenant, scope=scope), store_kv=store_kv, order=order
        )
        chain = self.cache.prompt_chain(item.scope, item.root, item.token_ids)
        sequence = SequenceState(item, lambda _: None, chain, self.now_s if arrival_s is None else arrival_s)
        self.scheduler.add(sequence)
        return sequence

    def schedule(self, *pace: float) -> list[Scheduled]:
        """Choose a step, compute it and settle it. ``pace``: of ``Scheduler.schedule``."""
        chosen = self.scheduler.schedule(*pace)
        for item in chosen:
            if item.admitted:
                self.started_s[item.sequence.request.request_id] = self.now_s
        self.now_s += max(sum(item.tokens for item in chosen) / RATE, 1e-6)
        for item in chosen:
            segment = item.sequence.segment(item.tokens)
            assert segment.end <= len(segment.blocks) * 16
            self.scheduler.computed(item)
            if segment.sampling is not None and item.sequence.append_token(1):
                self.scheduler.remove(item.sequence)
        return chosen

    def step(self, *pace: float) -> list[tuple[str, int]]:
        """Run a step and check every law; return (request, tokens) in order."""
        chosen = self.schedule(*pace)
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            assert_laws(sequence, 16)
        pool = self.cache.pool
        assert self.scheduler.reserved_blocks <= self.cache.available_blocks
        assert pool.free_blocks + pool.idle_blocks + pool.used_blocks == self.settings.num_blocks
        return [(item.sequence.request.request_id, item.tokens) for item in chosen]
