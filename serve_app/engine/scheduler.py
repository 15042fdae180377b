"""Which sequences run in the next step, and with how many tokens.

Owns the waiting line, the running set and the promise of blocks made to it. Knows nothing of tensors, threads or
clients. Rules: decode first; then prefill, least uncached work first, aged; a sequence whose next missing block
another one is computing waits for that block (single flight); admission promises the worst case in blocks, so a
running sequence never lacks one. Mutates sequences and the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router.block_hash import HASH_BYTES
from serve_app.cache.prefix_cache import PrefixCache
from serve_app.engine.lower_tiers import Fetched
from serve_app.engine.protocol import EngineSettings
from serve_app.engine.sequence import Sequence

AGING_TOKENS_PER_S = 2000.0
"""A sequence with u uncached tokens can be overtaken only by those that arrive within u / 2000 seconds after it."""

GROWTH_BLOCKS = 4
"""Blocks taken at once for generated tokens: longer runs of neighbours, at most three blocks held early."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence's share of a step. ``admitted``: this is its first. ``drafts``: tokens that may be drafted."""

    sequence: Sequence
    tokens: int
    admitted: bool = False
    drafts: int = 0


class Scheduler:
    """Continuous batching with chunked prefill over one prefix cache."""

    def __init__(self, settings: EngineSettings, cache: PrefixCache) -> None:
        self._settings = settings
        self._cache = cache
        self._waiting: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}
        self._promised_blocks = 0
        self._in_flight: dict[bytes, Sequence] = {}
        self._parked: dict[bytes, list[Sequence]] = {}
        self.fetch: Callable[[Sequence, list[int]], Fetched] | None = None
        """Asked before a prefill for the blocks that continue what the pool holds; see ``LowerTiers.fetch``."""

    @property
    def waiting(self) -> Iterable[Sequence]:
        """Sequences not admitted yet, those parked behind another's prefill included."""
        return self._waiting.values()

    @property
    def running(self) -> Iterable[Sequence]:
        """Admitted sequences."""
        return self._running.values()

    @property
    def waiting_count(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def running_count(self) -> int:
        """How many run."""
        return len(self._running)

    @property
    def promised_blocks(self) -> int:
        """Blocks promised to running sequences and not taken yet."""
        return self._promised_blocks

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in the waiting line. It must fit the pool (``check_request``)."""
        self._waiting[sequence.request.request_id] = sequence

    def find(self, request_id: str) -> Sequence | None:
        """Return a sequence that waits or runs here."""
        return self._waiting.get(request_id) or self._running.get(request_id)

    def remove(self, request_id: str) -> Sequence | None:
        """Drop a sequence, running or not, and free its blocks; None if it is not here."""
        sequence = self._waiting.pop(request_id, None)
        if sequence is not None:
            return sequence
        sequence = self._running.pop(request_id, None)
        if sequence is None:
            return None
        self._promised_blocks -= sequence.reserved_blocks
        sequence.reserved_blocks = 0
        self._land(sequence, sequence.prompt_tokens)
        sequence.release(self._cache)
        return sequence

    def schedule(self) -> list[Scheduled]:
        """Choose the next step; blocks for every chosen token are allocated."""
        budget = self._settings.max_num_batched_tokens
        chosen: list[Scheduled] = []
        prefilling: list[Sequence] = []
        # Drafts never take more than half of a step from prefill, nor a decode's own token.
        spare = budget // 2 - len(self._running) if self._settings.num_speculative_tokens else 0
        for sequence in self._running.values():
            if sequence.prefilling:
                prefilling.append(sequence)
            elif budget > 0:
                drafts = 0
                if spare > 0:
                    drafts = sequence.wanted_drafts(min(self._settings.num_speculative_tokens, spare))
                    spare -= drafts
                chosen.append(Scheduled(sequence, 1, drafts=drafts))
                budget -= 1 + drafts
        if budget > 0:
            self._schedule_prefill(budget, prefilling, chosen)
        for item in chosen:
            self._grow(item.sequence, item.sequence.computed + item.tokens + item.drafts)
        return chosen

    def computed(self, item: Scheduled, accepted: int = 0) -> None:
        """Note that a scheduled part's forward succeeded: its complete blocks become reusable.

        ``accepted`` drafted tokens, appended already, have KV too; what was drafted beyond is forgotten.
        """
        sequence = item.sequence
        sequence.computed += item.tokens + accepted
        sequence.publish(self._cache)
        self._land(sequence, sequence.computed // self._cache.block_size)

    def _schedule_prefill(self, budget: int, prefilling: list[Sequence], chosen: list[Scheduled]) -> None:
        if not prefilling and len(self._running) >= self._settings.max_num_seqs:
            return
        parked = {id(sequence) for line in self._parked.values() for sequence in line}
        candidates = [sequence for sequence in self._waiting.values() if id(sequence) not in parked]
        for sequence in candidates:
            self._refresh_hint(sequence)
        line = sorted([*prefilling, *candidates], key=self._rank)
        admitting = True
        for sequence in line:
            if budget <= 0:
                return
            admitted = not sequence.blocks
            if admitted and not (admitting and len(self._running) < self._settings.max_num_seqs):
                continue
            if admitted:
                verdict = self._admit(sequence)
                if verdict is None:
                    # Nobody overtakes a sequence for which there are no blocks yet, or it might wait for ever.
                    admitting = False
                if not verdict:
                    continue
            tokens = min(sequence.prompt_tokens - sequence.computed, budget)
            budget -= tokens
            chosen.append(Scheduled(sequence, tokens, admitted))

    def _rank(self, sequence: Sequence) -> float:
        return sequence.uncached_tokens(self._cache.block_size) + AGING_TOKENS_PER_S * sequence.arrival_s

    def _refresh_hint(self, sequence: Sequence) -> None:
        """Correct the guess of cached leading blocks, at two look-ups when nothing changed."""
        limit = self._cache.reusable_blocks(sequence.prompt_tokens)
        hint, chain = sequence.held_blocks_hint, sequence.chain
        if hint and not self._cache.held(chain[HASH_BYTES * (hint - 1) : HASH_BYTES * hint]):
            hint = self._cache.count_held(chain, hint)
        elif hint < limit and self._cache.held(chain[HASH_BYTES * hint : HASH_BYTES * (hint + 1)]):
            hint = self._cache.count_held(chain, limit)
        sequence.held_blocks_hint = hint

    def _admit(self, sequence: Sequence) -> bool | None:
        """Admit a waiting sequence: True; False when it is parked or loads; None when there are too few blocks."""
        cache, size = self._cache, self._cache.block_size
        matched = cache.match(sequence.request.scope, sequence.request.token_ids, sequence.chain)
        limit = cache.reusable_blocks(sequence.prompt_tokens)
        hits = len(matched)
        if hits < limit:
            missing = sequence.chain[HASH_BYTES * hits : HASH_BYTES * (hits + 1)]
            if missing in self._in_flight:
                self._parked.setdefault(missing, []).append(sequence)
                return False
        needed = -(-sequence.most_tokens // size) - hits
        idle_hits = sum(1 for block in matched if cache.pool.is_idle(block))
        if needed > cache.available_blocks - idle_hits - self._promised_blocks:
            return None
        if hits < limit and self.fetch is not None:
            fetched = self.fetch(sequence, matched)
            if fetched is Fetched.WAIT:
                return False
            if fetched is Fetched.LOADED:
                return self._admit(sequence)
        cache.acquire(matched)
        sequence.add_blocks(matched)
        sequence.published = sequence.landed = hits
        sequence.computed = sequence.cached_tokens = hits * size
        if self._settings.num_speculative_tokens:
            sequence.drafted = sequence.computed
        sequence.reserved_blocks = needed
        self._promised_blocks += needed
        del self._waiting[sequence.request.request_id]
        self._running[sequence.request.request_id] = sequence
        # The whole prompt at once, so that it lies in one run where the pool allows it.
        self._take(sequence, -(-sequence.prompt_tokens // size) - hits)
        for i in range(hits, limit):
            self._in_flight.setdefault(sequence.chain[HASH_BYTES * i : HASH_BYTES * (i + 1)], sequence)
        return True

    def _grow(self, sequence: Sequence, tokens: int) -> None:
        missing = -(-tokens // self._cache.block_size) - len(sequence.blocks)
        if missing > 0:
            self._take(sequence, min(max(missing, GROWTH_BLOCKS), sequence.reserved_blocks))

    def _take(self, sequence: Sequence, count: int) -> None:
        sequence.add_blocks(self._cache.allocate(count))
        sequence.reserved_blocks -= count
        self._promised_blocks -= count

    def _land(self, sequence: Sequence, blocks: int) -> None:
        """End the flight of a sequence's first ``blocks`` prompt blocks and wake who waited for them."""
        limit = min(blocks, self._cache.reusable_blocks(sequence.prompt_tokens))
        for i in range(sequence.landed, limit):
            block_hash = sequence.chain[HASH_BYTES * i : HASH_BYTES * (i + 1)]
            if self._in_flight.get(block_hash) is sequence:
                del self._in_flight[block_hash]
                self._parked.pop(block_hash, None)
        sequence.landed = max(sequence.landed, limit)
