"""The sequences that run, and the blocks they take.

Owns their start, growth, preemption and end. Knows nothing of the waiting line or of steps. A sequence takes what it
was promised whenever it wants, more where there is room, and where there is none somebody gives way (``preemption``).
Mutates sequences and the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.scheduling.admission import Admission
from serve_app.engine.scheduling.pending_blocks import Flights
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import AdapterSlots

GROWTH_BLOCKS = 4
"""Blocks taken at once for generated tokens: longer runs of neighbours, at most three blocks held early."""


class RunningSet:
    """Admitted sequences by request id, in the order of their starts."""

    def __init__(
        self, settings: EngineSettings, cache: PrefixCache, flights: Flights, adapters: AdapterSlots | None
    ) -> None:
        self.sequences: dict[str, SequenceState] = {}
        self.admission = Admission(settings, cache)
        self._speculates = settings.num_speculative_tokens > 0
        self._cache = cache
        self._flights = flights
        self._adapters = adapters

    def start(self, sequence: SequenceState, matched: Sequence[int], promised: int) -> None:
        """Let a sequence run whose ``promised`` blocks, those besides the ``matched`` ones, were found to fit."""
        cache, size, hits = self._cache, self._cache.block_size, len(matched)
        if self._adapters is not None:
            self._adapters.acquire(sequence.request.scope.lora)
        cache.acquire(matched)
        sequence.add_blocks(matched)
        sequence.published = hits
        sequence.computed = hits * size
        if not sequence.preemptions:
            sequence.cached_tokens = sequence.computed
        if self._speculates:
            sequence.drafted = sequence.computed
        sequence.reserved_blocks = promised
        self.admission.started(sequence.request.tenant, promised)
        self.sequences[sequence.request.request_id] = sequence
        # All of the prefill at once, so that it lies in one run where the pool allows it.
        self._take(sequence, -(-sequence.prefill_tokens // size) - hits)
        self._flights.begin(sequence, hits, cache.reusable_blocks(sequence.prefill_tokens))

    def make_room(self) -> list[SequenceState]:
        """See that every decode has a block for its token, the first to arrive first; return who had to give way."""
        running, size = self.sequences, self._cache.block_size
        gave_way: list[SequenceState] = []
        growing = [s for s in running.values() if not s.prefilling and s.computed >= size * len(s.blocks)]
        for sequence in sorted(growing, key=lambda s: s.number):
            while sequence.request.request_id in running and not self._grow(sequence, 1):
                loser = who_gives_way(sequence, running.values(), self._cache.quota.over_share)
                self._leave(loser)
                loser.preempt(self._cache)
                gave_way.append(loser)
        return gave_way

    def end(self, sequence: SequenceState) -> None:
        """Let a sequence run no more and free its blocks."""
        self._leave(sequence)
        sequence.release(self._cache)

    def drafts(self, sequence: SequenceState, most: int) -> int:
        """Return how many tokens may be drafted for a decode: nobody gives way to a guess."""
        size = self._cache.block_size
        wanted = sequence.wanted_drafts(most)
        missing = -(-(sequence.computed + 1 + wanted) // size) - len(sequence.blocks)
        if missing <= 0 or self._grow(sequence, missing):
            return wanted
        return size * len(sequence.blocks) - sequence.computed - 1

    def land(self, sequence: SequenceState, tokens: int) -> None:
        """Let nobody wait any more for a sequence's complete blocks up to ``tokens``."""
        cache = self._cache
        reusable = cache.reusable_blocks(sequence.prefill_tokens)
        self._flights.land(sequence, min(tokens // cache.block_size, reusable))

    def _grow(self, sequence: SequenceState, missing: int) -> bool:
        """Take ``missing`` blocks or a few more; False, changing nothing, where they are neither promised nor free."""
        wanted = -(-sequence.most_tokens // self._cache.block_size) - len(sequence.blocks)
        wanted = min(max(missing, GROWTH_BLOCKS), wanted)
        promised = sequence.reserved_blocks
        if promised >= missing:
            wanted = min(wanted, promised)
        else:
            wanted = min(wanted, promised + max(self.admission.growth_room(sequence.request.tenant), 0))
            if wanted < missing:
                return False
        self._take(sequence, wanted)
        return True

    def _take(self, sequence: SequenceState, blocks: int) -> None:
        tenant, promised = sequence.request.tenant, min(blocks, sequence.reserved_blocks)
        sequence.add_blocks(self._cache.allocate(blocks, tenant))
        sequence.beyond_promise |= blocks > promised
        sequence.reserved_blocks -= promised
        self.admission.taken(tenant, promised)

    def _leave(self, sequence: SequenceState) -> None:
        del self.sequences[sequence.request.request_id]
        self.admission.ended(sequence.request.tenant, sequence.reserved_blocks)
        sequence.reserved_blocks = 0
        if self._adapters is not None:
            self._adapters.release(sequence.request.scope.lora)
        self.land(sequence, sequence.prefill_tokens)


PROMISED_TOKENS = 64
"""Generated tokens that every start has room for, where no more were generated before it."""


def promised_blocks(sequence: SequenceState, block_size: int, *, worst_case: bool) -> int:
    """Return the blocks, those it hits included, that a sequence has to be promised before it starts."""
    most = sequence.most_tokens
    if not worst_case:
        most = min(most, sequence.prefill_tokens + max(sequence.generated_tokens, PROMISED_TOKENS))
    return -(-most // block_size)


def who_gives_way(
    grower: SequenceState, running: Iterable[SequenceState], over_share: Callable[[str], float]
) -> SequenceState:
    """Return which of the ``running`` sequences, ``grower`` among them, gives its blocks back.

    The latest arrival of the tenant most over its share (``over_share``: 0.0 for those within). Spared are those that
    came before ``grower`` and have taken no more than was promised to them.
    """
    able = (s for s in running if s is grower or s.beyond_promise or s.number > grower.number)
    return max(able, key=lambda sequence: (over_share(sequence.request.tenant), sequence.number))
