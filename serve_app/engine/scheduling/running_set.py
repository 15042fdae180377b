"""The running sequences, with their allocated and reserved blocks, in total and by tenant.

Owns their start, growth, preemption and end. A tenant within its share, or with nothing running, may start any
sequence that fits. A tenant beyond its share borrows: it must leave the idle blocks within others' shares, and an
eighth of slots and blocks, so that a newcomer can start at once. A sequence takes its reserved blocks when it needs
them, and more while blocks are free; otherwise a victim is preempted. Mutates sequences and the prefix cache.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from router.protocol.block_hash import hash_at
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import AdapterSlots, ceil_div
from serve_app.fairness.shares import UNBORROWED_PART, Budget, Claim, Verdict, verdict

AdmissionVerdict = Literal[Verdict, "parked"]

GROWTH_BLOCKS = 4
"""Blocks allocated at once for generated tokens: longer contiguous runs, and at most three blocks held early."""

RESERVED_TOKENS = 64
"""Generated tokens that every start reserves blocks for, unless more are expected or generated already."""


class PendingBlocks:
    """Single flight: when one sequence is computing a block, the others wait for it and do not compute it again."""

    def __init__(self) -> None:
        self._computing: dict[bytes, SequenceState] = {}
        self._parked: dict[bytes, list[SequenceState]] = {}

    def begin(self, sequence: SequenceState, first: int, last: int) -> None:
        """Note that ``sequence`` will compute blocks ``first`` to ``last`` - 1; no other waits if it stores none."""
        sequence.resolved = first
        if not sequence.request.store_kv:
            return
        for i in range(first, last):
            self._computing.setdefault(hash_at(sequence.chain, i), sequence)

    def has(self, block_hash: bytes) -> bool:
        """Return whether a running sequence is computing this block of its prompt (any thread; a hint)."""
        return block_hash in self._computing

    def park(self, sequence: SequenceState, block_hash: bytes) -> bool:
        """Let ``sequence`` wait for a block if another sequence is computing it; return whether it waits."""
        if block_hash not in self._computing:
            return False
        self._parked.setdefault(block_hash, []).append(sequence)
        return True

    def parked(self) -> set[int]:
        """Return the ids (``id``) of the sequences that wait for a block."""
        return {id(sequence) for line in self._parked.values() for sequence in line}

    def awaited_tenants(self) -> set[str]:
        """Return the tenants that compute a block another tenant's sequence waits for."""
        computing = ((self._computing[block_hash].request.tenant, line) for block_hash, line in self._parked.items())
        return {tenant for tenant, line in computing if any(waiter.request.tenant != tenant for waiter in line)}

    def awaited(self, sequence: SequenceState, by: Callable[[SequenceState], bool]) -> bool:
        """Return whether a sequence computes a block that one of these waits for."""
        lines = (line for block, line in self._parked.items() if self._computing.get(block) is sequence)
        return any(by(waiter) for line in lines for waiter in line)

    def resolve(self, sequence: SequenceState, last: int) -> None:
        """Wake the sequences that wait for a sequence's blocks before ``last``: computed, or never to be."""
        for i in range(sequence.resolved, last):
            block_hash = hash_at(sequence.chain, i)
            if self._computing.get(block_hash) is sequence:
                del self._computing[block_hash]
                self._parked.pop(block_hash, None)
        sequence.resolved = max(sequence.resolved, last)


class RunningSet:
    """Admitted sequences by request id, in start order."""

    def __init__(
        self, settings: EngineSettings, cache: PrefixCache, pending: PendingBlocks, adapters: AdapterSlots | None
    ) -> None:
        self.sequences: dict[str, SequenceState] = {}
        self.reserved_blocks = 0
        self._slots = Budget(cache.quota.shares, lambda: settings.max_num_seqs)
        self._reserved: Counter[str] = Counter()
        self._cache = cache
        self._pending = pending
        self._adapters = adapters

    def verdict(self, tenant: str, needed: int, idle_hits: int) -> Verdict:
        """Return whether ``needed`` blocks can be reserved besides the hits, of which ``idle_hits`` are idle now."""
        return verdict(self._slots.claim(tenant, 1), self._claim(tenant, needed, idle_hits))

    def _claim(self, tenant: str, blocks: int, idle_hits: int = 0) -> Claim:
        cache, total = self._cache, self._cache.pool.total_blocks
        fraction = cache.quota.shares.fraction(tenant)
        # With pins alone, which are in use too, it may start all that fits.
        in_use = cache.quota.in_use(tenant) + self._reserved[tenant] if self._slots.held(tenant) else 0
        reserve = cache.quota.protected(tenant) + total // UNBORROWED_PART if fraction < 1.0 else 0
        room = cache.available_blocks - idle_hits - self.reserved_blocks
        return Claim(blocks, in_use, fraction * total, room, reserve)

    def _growth_room(self, tenant: str) -> int:
        """Return how many blocks a running sequence of ``tenant`` may allocate beyond its reservation."""
        claim = self._claim(tenant, 1)
        borrows = self._slots.held(tenant) > 1 and not claim.within  # a lone sequence is not held back
        return int(claim.free) - (claim.reserve if borrows else 0)

    def start(self, sequence: SequenceState, matched: Sequence[int], reserved: int) -> None:
        """Run a sequence; ``reserved`` blocks besides the ``matched`` ones are known to fit."""
        cache, size, hits = self._cache, self._cache.block_size, len(matched)
        if self._adapters is not None:
            self._adapters.acquire(sequence.request.scope.lora)
        cache.acquire(matched)
        cache.hit(matched)
        sequence.blocks.extend(matched)
        sequence.published = hits
        sequence.computed = hits * size
        if not sequence.preemptions:
            sequence.cached_tokens = sequence.computed
        sequence.reserved_blocks = reserved
        self._slots.take(sequence.request.tenant, 1)
        self._reserve(sequence.request.tenant, reserved)
        self.sequences[sequence.request.request_id] = sequence
        # The whole prefill at once, so that it is contiguous where the pool allows it.
        self._take(sequence, ceil_div(sequence.prefill_tokens, size) - hits)
        self._pending.begin(sequence, hits, cache.reusable_blocks(sequence.prefill_tokens))

    def make_room(self) -> list[SequenceState]:
        """Give every decode a block for its token, in arrival order; return the preempted sequences."""
        running, size = self.sequences, self._cache.block_size
        preempted: list[SequenceState] = []
        growing = [s for s in running.values() if s.prefill_tokens <= s.computed >= size * len(s.blocks)]
        for sequence in sorted(growing, key=lambda s: s.number):
            while sequence.request.request_id in running and not self._grow(sequence):
                victim = choose_victim(sequence, running.values(), self._cache.quota.over_share)
                self.preempt(victim)
                preempted.append(victim)
        return preempted

    def preempt(self, sequence: SequenceState) -> None:
        """Take a sequence's slot and blocks; it is to wait again."""
        self._leave(sequence)
        sequence.preempt(self._cache)

    def end(self, sequence: SequenceState) -> None:
        """Remove a sequence from the running set and free its blocks."""
        self._leave(sequence)
        sequence.release(self._cache)

    def resolve(self, sequence: SequenceState, tokens: int) -> None:
        """Wake the sequences that wait for a sequence's complete blocks up to ``tokens``."""
        cache = self._cache
        reusable = cache.reusable_blocks(sequence.prefill_tokens)
        self._pending.resolve(sequence, min(tokens // cache.block_size, reusable))

    def _grow(self, sequence: SequenceState) -> bool:
        """Allocate one or a few blocks; return False, changing nothing, if none is reserved or free."""
        needed = ceil_div(sequence.most_tokens, self._cache.block_size) - len(sequence.blocks)
        room = sequence.reserved_blocks or self._growth_room(sequence.request.tenant)
        if room <= 0:
            return False
        self._take(sequence, min(GROWTH_BLOCKS, needed, room))
        return True

    def _take(self, sequence: SequenceState, blocks: int) -> None:
        tenant, reserved = sequence.request.tenant, min(blocks, sequence.reserved_blocks)
        sequence.blocks.extend(self._cache.allocate(blocks, tenant))
        sequence.beyond_reservation |= blocks > reserved
        sequence.reserved_blocks -= reserved
        self._reserve(tenant, -reserved)

    def _leave(self, sequence: SequenceState) -> None:
        del self.sequences[sequence.request.request_id]
        tenant = sequence.request.tenant
        self._reserve(tenant, -sequence.reserved_blocks)
        sequence.reserved_blocks = 0
        self._slots.give_back(tenant, 1)
        if not self._slots.held(tenant):
            del self._reserved[tenant]  # nothing runs, so nothing is reserved: the table stays small
        if self._adapters is not None:
            self._adapters.release(sequence.request.scope.lora)
        self.resolve(sequence, sequence.prefill_tokens)

    def _reserve(self, tenant: str, blocks: int) -> None:
        self._reserved[tenant] += blocks
        self.reserved_blocks += blocks


def blocks_to_reserve(sequence: SequenceState, block_size: int) -> int:
    """Return the blocks to reserve for a sequence that starts, cache hits included."""
    expected = max(sequence.generated_tokens, sequence.request.expected_tokens, RESERVED_TOKENS)
    first = sequence.prefill_tokens + expected
    return ceil_div(min(sequence.most_tokens, first), block_size)


def choose_victim(
    grower: SequenceState, running: Iterable[SequenceState], over_share: Callable[[str], float]
) -> SequenceState:
    """Return the one of the ``running`` sequences, ``grower`` among them, to preempt.

    It is the latest arrival of the tenant most over its share (``over_share``: 0.0 for tenants within theirs).
    Sequences that arrived before ``grower`` and stay within their reservation are spared.
    """
    able = (s for s in running if s is grower or s.beyond_reservation or s.number > grower.number)
    return max(able, key=lambda sequence: (over_share(sequence.request.tenant), sequence.number))
