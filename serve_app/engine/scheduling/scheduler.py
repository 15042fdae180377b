"""Choose the sequences that run in the next step, and their numbers of tokens.

Owns the waiting queue. Decodes come first; those of heavy tenants, and those that yield, take turns if they would make
others' answers slow. Then prefill is fair between tenants (``fair_queue``); within a tenant the lowest ``order`` runs
first, then the least uncached work, with aging. A sequence waits for its next missing block while another sequence
computes it (``PendingBlocks``). A starting sequence gets a reservation, and when the pool is
exhausted a victim is preempted (``running_set``). Sequences that yield (``YIELDING_ORDER``) prefill with what the
others' turns leave, and are preempted for a start. Mutates sequences and the prefix cache.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, ValuesView
from itertools import count
from typing import Literal, NamedTuple

import msgspec

from router.protocol.block_hash import HASH_BYTES, hash_at
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.scheduling.fair_queue import LEAST_STEP_TOKENS, QUANTUM_TOKENS, FairQueue
from serve_app.engine.scheduling.running_set import AdmissionVerdict, PendingBlocks, RunningSet, blocks_to_reserve
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import AdapterSlots
from serve_app.fairness.queue import YIELDING_ORDER

AGING_SHARE = 0.1
"""Within its tenant, only sequences that arrive within ten times its own computing time can overtake a sequence. So
it starts once its tenant's turns have computed all that arrived before it or in that time. Without aging long prompts
would starve; with much aging cached prompts wait for uncached ones, and are evicted meanwhile."""

USUAL_TOKENS_PER_S = 20_000.0
"""The rate at which sequences age while none is measured."""

PREFILL_S = 0.1
"""Upper target for a step's prefill, because requests that arrive meanwhile wait for its end."""

BESIDE_HEAVY_S = 0.025
"""The same for a tenant that is heavy, because another one was here some steps ago and may come back."""

HEAVY_DECODES_PART = 0.5
"""Beside others' decodes, those of heavy tenants make a step longer by at most this part; with their prefill, twice."""

YIELDING_PART = 32
"""Beside others' decodes, prefill that yields makes a step longer by at most this fraction (1/n)."""
QUIET_STEPS = 500
"""After this many steps (some seconds) without others, prefill that yields has whole steps. Before, they are as long as
a step of decodes, because somebody who comes waits for its end."""

Fetched = Literal["nothing", "loaded", "wait"]
"""The result of a fetch: nothing was found, blocks were loaded into the pool, or the caller must ask again later."""

Fetch = Callable[[SequenceState, list[int]], Fetched]
"""Loads the blocks that continue a sequence's matched ones, if a tier has them."""


def yields(sequence: SequenceState) -> bool:
    """Return whether a sequence waits for all tenants' others."""
    return sequence.request.order >= YIELDING_ORDER


class StepPace(NamedTuple):
    """What a step takes, as measured; 0.0 while unknown."""

    prefill_tokens_per_s: float
    decode_base_s: float
    decode_each_s: float

    def decodes_s(self, sequences: int) -> float:
        """Return the seconds of a step in which so many sequences decode."""
        return self.decode_base_s + self.decode_each_s * sequences

    def tokens_in(self, seconds: float) -> float:
        """Return the tokens that are prefilled meanwhile."""
        return self.prefill_tokens_per_s * seconds


class Scheduled(msgspec.Struct, frozen=True):
    """A sequence's share of a step. ``admitted``: whether this is its first step."""

    sequence: SequenceState
    tokens: int
    admitted: bool = False


class Scheduler:
    """Continuous batching with chunked prefill over one prefix cache. ``fetch``: see ``TierLoader.fetch``."""

    def __init__(
        self,
        settings: EngineSettings,
        cache: PrefixCache,
        adapters: AdapterSlots | None = None,
        fetch: Fetch | None = None,
    ) -> None:
        self._settings = settings
        self._cache = cache
        self._adapters = adapters
        self._fetch = fetch
        self._waiting: dict[str, SequenceState] = {}
        self.pending = PendingBlocks()
        self._running = RunningSet(settings, cache, self.pending, adapters)
        self.fair_queue: FairQueue[SequenceState] = FairQueue(settings.max_num_batched_tokens)
        self._yielding_queue: FairQueue[SequenceState] = FairQueue(settings.max_num_batched_tokens)
        self._claim: SequenceState | None = None
        self._denied: SequenceState | None = None
        """The first sequence of the last step that found no room, and does not yield."""
        self._slot_claim: str | None = None
        self._stopped: set[str] = set()
        self._numbers = count()
        self._decode_turns = count(1)
        self._aging_tokens_per_s = AGING_SHARE * USUAL_TOKENS_PER_S
        self._touched = False
        self._quiet_steps = QUIET_STEPS
        """Steps since the last one with a sequence that does not yield."""
        self.preempted: list[SequenceState] = []
        """Sequences preempted in the last ``schedule``; they are waiting again."""

    @property
    def waiting(self) -> ValuesView[SequenceState]:
        """Sequences that are not running: new, preempted, or parked behind another sequence's prefill."""
        return self._waiting.values()

    @property
    def running(self) -> ValuesView[SequenceState]:
        """Admitted sequences."""
        return self._running.sequences.values()

    @property
    def startable_count(self) -> int:
        """Number of waiting sequences, without those that wait for KV in transit."""
        return sum(1 for sequence in self.waiting if not sequence.awaits_remote_kv)

    @property
    def reserved_blocks(self) -> int:
        """Blocks reserved for running sequences and not allocated yet."""
        return self._running.reserved_blocks

    def ready(self) -> list[SequenceState]:
        """Return the sequences that wait only for their turn."""
        parked = self.pending.parked()
        return [one for one in self._waiting.values() if id(one) not in parked and not one.awaits_remote_kv]

    def add(self, sequence: SequenceState) -> None:
        """Put a sequence in the waiting queue. It must fit the pool (``check_request``).

        It gets the turn of the first sequence of its tenant that starts after it, which gets the turn of the next, and
        so on. Thus the tenant's turns keep their places among the others', whichever of its requests uses them.
        """
        sequence.number = next(self._numbers)
        own = sequence.request
        others = (other for other in self._waiting.values() if other.request.tenant == own.tenant)
        later = [other for other in others if other.request.order > own.order and not self._begun(other)]
        for other in sorted(later, key=lambda other: other.number, reverse=True):
            other.swap_turn(sequence)
        self._waiting[own.request_id] = sequence
        self._cache.quota.touch(own.tenant)

    def missing_block(self, sequence: SequenceState) -> bytes:
        """Return the hash of the first block that a waiting sequence lacks, by its hint; b"" if it lacks no block."""
        first = sequence.cached_blocks_hint
        lacks = first < sequence.reusable_blocks(self._cache)
        return hash_at(sequence.chain, first) if lacks else b""

    def find(self, request_id: str) -> SequenceState | None:
        """Return the waiting or running sequence with this id."""
        return self._waiting.get(request_id) or self._running.sequences.get(request_id)

    def remove(self, sequence: SequenceState) -> None:
        """Drop a sequence, running or not, and free its blocks."""
        if self._waiting.pop(sequence.request.request_id, None) is None:
            self._running.end(sequence)

    def schedule(
        self, prefill_tokens_per_s: float = 0.0, decode_base_s: float = 0.0, decode_each_s: float = 0.0
    ) -> list[Scheduled]:
        """Choose the next step and allocate blocks for each of its tokens. After a preemption no sequence starts.

        The measured prefill rate and duration of a decode-only step (``decode_base_s`` and ``decode_each_s`` for each
        of its sequences), 0.0 while unknown, limit the prefill of the step, and the decodes of heavy tenants.
        """
        pace = StepPace(prefill_tokens_per_s, decode_base_s, decode_each_s)
        if prefill_tokens_per_s:
            self._aging_tokens_per_s = AGING_SHARE * prefill_tokens_per_s
        self.preempted = self._running.make_room() or self._make_way()
        self._waiting.update((sequence.request.request_id, sequence) for sequence in self.preempted)
        budget = self._settings.max_num_batched_tokens
        prefilling: list[SequenceState] = []
        decoding: list[SequenceState] = []
        for sequence in self.running:
            (prefilling if sequence.computed < sequence.prefill_tokens else decoding).append(sequence)
        decoding = self._in_turns(decoding, prefilling, pace)
        chosen = [Scheduled(sequence, 1) for sequence in decoding[:budget]]
        budget -= len(chosen)
        if budget > 0:
            if prefill_tokens_per_s:
                budget = min(budget, max(LEAST_STEP_TOKENS, int(prefill_tokens_per_s * PREFILL_S)))
                if chosen and pace.decodes_s(1):
                    most = pace.tokens_in(self._settings.max_itl_s - pace.decodes_s(len(chosen)))
                    budget = int(min(budget, max(QUANTUM_TOKENS, most)))
            self._schedule_prefill(budget, pace, prefilling, chosen)
        return chosen

    def computed(self, item: Scheduled) -> None:
        """Note that an item's forward succeeded: its complete blocks are reusable."""
        sequence = item.sequence
        prefilling = sequence.computed < sequence.prefill_tokens
        sequence.computed += item.tokens
        if sequence.computed >= self._cache.block_size * (sequence.published + 1):
            sequence.publish(self._cache)
        if prefilling:
            self._running.resolve(sequence, sequence.computed)

    def _in_turns(
        self, decoding: list[SequenceState], prefilling: list[SequenceState], pace: StepPace
    ) -> list[SequenceState]:
        """Return the sequences that decode in this step.

        Beside others' work, those of heavy tenants and those that yield are as many as may make steps longer. They
        take turns, among tenants and within each.
        """
        if pace.decode_each_s <= 0.0:
            return decoding
        heavy = {tenant for tenant in {s.request.tenant for s in decoding} if self.fair_queue.is_heavy(tenant)}
        behind = [sequence for sequence in decoding if yields(sequence) or sequence.request.tenant in heavy]
        first = len(decoding) - len(behind)
        if behind and not first:
            first = int(self._light_prefill([*prefilling, *self.ready()]))
        room = max(1, int(min(len(behind), HEAVY_DECODES_PART * pace.decodes_s(first) / pace.decode_each_s)))
        if not first or len(behind) <= room:
            return decoding
        behind.sort(key=lambda sequence: sequence.decode_turn)
        places: Counter[str] = Counter()
        turns: list[tuple[int, int, SequenceState]] = []
        for number, sequence in enumerate(behind):
            turns.append((places[sequence.request.tenant], number, sequence))
            places[sequence.request.tenant] += 1
        turns.sort()
        for _, _, sequence in turns[:room]:
            sequence.decode_turn = next(self._decode_turns)
        waiting = {id(sequence) for _, _, sequence in turns[room:]}
        return [sequence for sequence in decoding if id(sequence) not in waiting]

    def _light_prefill(self, candidates: Iterable[SequenceState]) -> bool:
        """Return whether one of these prefills for whom others make way: it has begun, or may start."""
        starts = len(self.running) < self._settings.max_num_seqs
        able = (sequence for sequence in candidates if sequence.blocks or (starts and sequence is not self._denied))
        return any(not yields(one) and not self.fair_queue.is_heavy(one.request.tenant) for one in able)

    def _heavy_budgets(
        self, pace: StepPace, lines: Mapping[str, deque[SequenceState]], decodes: Counter[str]
    ) -> dict[str, int]:
        """Return the most tokens of each heavy tenant among those with prefill.

        Beside others they have as much time as those take for their decodes, less what their own decodes take, and a
        turn at least. If others have nothing to do, somebody may come and wait for the end of the step.
        """
        if not pace.prefill_tokens_per_s or not pace.decodes_s(1):
            return {}
        heavy = [tenant for tenant in lines if self.fair_queue.is_heavy(tenant)]
        light = self._light_prefill(line[0] for line in lines.values())
        budgets = {}
        for tenant in heavy:
            others = decodes.total() - decodes[tenant]
            if others or light:
                others_s = pace.decodes_s(max(1, others))
                left_s = max(others_s / 2, others_s - pace.decode_each_s * decodes[tenant])
                tokens = int(pace.tokens_in(left_s)) // len(heavy)
                budgets[tenant] = max(self.fair_queue.next_turn(tenant), tokens)
            else:
                budgets[tenant] = max(QUANTUM_TOKENS, int(pace.tokens_in(BESIDE_HEAVY_S)))
        return budgets

    def _schedule_prefill(
        self, budget: int, pace: StepPace, prefilling: list[SequenceState], chosen: list[Scheduled]
    ) -> None:
        """Hand out ``budget`` tokens in turns; heavy tenants and sequences that yield get less beside others."""
        if not prefilling and len(self.running) >= self._settings.max_num_seqs:
            return
        candidates = self.ready()
        lines: dict[str, deque[SequenceState]] = {}
        yielding: dict[str, deque[SequenceState]] = {}
        for sequence in candidates:
            self._refresh_hint(sequence)
        for sequence in sorted([*prefilling, *candidates], key=self._turn_s):
            these = yielding if self._yields(sequence) else lines
            these.setdefault(sequence.request.tenant, deque()).append(sequence)
        lines = {tenant: self._in_order(line) for tenant, line in lines.items()}
        decodes = Counter([item.sequence.request.tenant for item in chosen])
        self.fair_queue.begin(lines, decodes, self.pending.awaited_tenants())
        left = self._heavy_budgets(pace, lines, decodes)
        self._stopped.clear()
        self._touched = False
        self._denied = None
        if self._claim not in candidates:
            self._claim = None
        plan: dict[SequenceState, Scheduled] = {}
        self.fair_queue.hand_out(budget, lambda _, line, most: self._serve(line, most, plan), left)
        self._quiet_steps += 1
        if plan or any(not yields(item.sequence) for item in chosen):
            self._quiet_steps = 0
        if yielding:
            gentle_budget = int(pace.tokens_in(pace.decodes_s(len(chosen)))) or LEAST_STEP_TOKENS
            budget -= sum(item.tokens for item in plan.values())
            if not self._quiet_steps:
                budget = min(budget, max(1, gentle_budget // YIELDING_PART))
            elif self._quiet_steps < QUIET_STEPS:
                budget = min(budget, gentle_budget // 4 if chosen else gentle_budget)
            self._yielding_queue.begin(yielding, decodes)
            self._yielding_queue.hand_out(budget, lambda _, line, most: self._serve(line, most, plan))
        chosen.extend(plan.values())

    def _yields(self, sequence: SequenceState) -> bool:
        """Return whether a sequence prefills after all others: none of those waits for its blocks."""
        return yields(sequence) and not self.pending.awaited(sequence, lambda waiter: not yields(waiter))

    def _make_way(self) -> list[SequenceState]:
        """Preempt sequences that yield, the last started first, until another one that waits has a slot and blocks."""
        denied, full = self._denied, len(self.running) >= self._settings.max_num_seqs
        able = [one for one in self.running if yields(one)] if denied is not None or full else []
        if not able:
            return []
        waiting = denied if denied is not None and denied.request.request_id in self._waiting else None
        if waiting is None and full:
            waiting = next((one for one in self.ready() if not yields(one)), None)
        preempted: list[SequenceState] = []
        while waiting is not None and able:
            needed = blocks_to_reserve(waiting, self._cache.block_size) - waiting.cached_blocks_hint
            fits = self._running.verdict(waiting.request.tenant, needed, 0) == "granted"
            if fits and len(self.running) < self._settings.max_num_seqs:
                break
            preempted.append(able.pop())
            self._running.preempt(preempted[-1])
        return preempted

    def _serve(self, line: deque[SequenceState], limit: int, plan: dict[SequenceState, Scheduled]) -> int:
        """Plan up to ``limit`` tokens of a tenant's queue; return the number. Unfinished sequences stay queued."""
        spent = 0
        while line and spent < limit:
            sequence = line[0]
            planned = plan.get(sequence)
            starts = not sequence.blocks
            if starts and not self._start(sequence):
                line.popleft()
                continue
            before = planned.tokens if planned is not None else 0
            left = sequence.prefill_tokens - sequence.computed - before
            tokens = min(left, limit - spent)
            spent += tokens
            first = starts and not sequence.preemptions
            plan[sequence] = Scheduled(sequence, before + tokens, first or (planned is not None and planned.admitted))
            if tokens == left:
                line.popleft()
        return spent

    def _start(self, sequence: SequenceState) -> bool:
        """Admit a waiting sequence if its turn, the slots and the blocks allow it."""
        tenant = sequence.request.tenant
        if len(self.running) >= self._settings.max_num_seqs or tenant in self._stopped:
            return False
        others_turn = self._claim is not None and self._claim.request.tenant != tenant
        if self.preempted or others_turn or not self._has_slot(sequence):
            return False
        if self._denied is not None and yields(sequence):
            return False
        verdict = self._admit(sequence)
        # A sequence within its share that finds no blocks is not overtaken, or it might wait forever.
        if not yields(sequence):
            self._claim = sequence if verdict == "no_room" else None
        if verdict in ("no_room", "over_share"):
            self._stopped.add(tenant)
            if self._denied is None and not yields(sequence):
                self._denied = sequence
            claimant = self._waiting.get(self._slot_claim or "")
            if claimant is not None and claimant.request.tenant == tenant:
                self._slot_claim = None
        return verdict == "granted"

    def _has_slot(self, sequence: SequenceState) -> bool:
        """Return whether a sequence needs no adapter slot or may take one; one that waits is not overtaken."""
        request, adapters = sequence.request, self._adapters
        if adapters is None or not request.scope.lora:
            return True
        if self._slot_claim not in (None, request.request_id) and self._slot_claim in self._waiting:
            return False
        room = adapters.room(request.scope.lora)
        self._slot_claim = None if room or yields(sequence) else request.request_id
        return room

    def rank(self, sequence: SequenceState) -> tuple[int, float]:
        """Return a sequence's place among those of its tenant: the lowest is computed first."""
        first = self._begun(sequence) and not yields(sequence)
        return 0 if first else sequence.request.order, self._turn_s(sequence)

    def next_rank(self, now_s: float) -> tuple[int, float]:
        """Return the place of a one-token sequence of the default order that arrives now."""
        return 0, now_s + 1 / self._aging_tokens_per_s

    def _begun(self, sequence: SequenceState) -> bool:
        """Return whether other sequences may already wait for this one: its order no longer counts."""
        return bool(sequence.blocks or sequence.preemptions) or sequence.request.request_id == self._slot_claim

    def _in_order(self, line: deque[SequenceState]) -> deque[SequenceState]:
        """Return a tenant's queue with the lowest order first; sequences that have begun count as lowest."""
        if len({one.request.order for one in line}) == 1:
            return line
        least = min((one.request.order for one in line if not self._begun(one)), default=0)
        return deque(sorted(line, key=lambda one: least if self._begun(one) else one.request.order))

    def _turn_s(self, sequence: SequenceState) -> float:
        # A preempted sequence was already overtaken: it counts as having nothing to compute.
        work = 0 if sequence.preemptions else sequence.uncached_tokens(self._cache.block_size)
        return sequence.turn_s + work / self._aging_tokens_per_s

    def _refresh_hint(self, sequence: SequenceState) -> None:
        """Update the estimate of cached leading blocks; two look-ups if nothing changed."""
        limit = sequence.reusable_blocks(self._cache)
        hint, chain = sequence.cached_blocks_hint, sequence.chain
        # ``hash_at`` inlined: every step checks every waiting sequence.
        if hint and not self._cache.index.held(chain[HASH_BYTES * (hint - 1) : HASH_BYTES * hint]):
            hint = self._cache.index.count_held(chain, hint)
        elif hint < limit and self._cache.index.held(chain[HASH_BYTES * hint : HASH_BYTES * (hint + 1)]):
            hint = self._cache.index.count_held(chain, limit)
        sequence.cached_blocks_hint = hint

    def _admit(self, sequence: SequenceState) -> AdmissionVerdict:
        """Admit a waiting sequence, park it behind another's block or a load, or return the missing resource."""
        cache = self._cache
        limit = sequence.reusable_blocks(cache)
        matched = cache.match(sequence.request.scope, sequence.identity, sequence.chain) if limit else []
        hits = len(matched)
        if hits < limit and self.pending.park(sequence, hash_at(sequence.chain, hits)):
            return "parked"
        needed = blocks_to_reserve(sequence, cache.block_size) - hits
        idle_hits = sum(1 for block in matched if cache.pool.is_idle(block))
        verdict = self._running.verdict(sequence.request.tenant, needed, idle_hits)
        if verdict != "granted":
            return verdict
        if hits < limit and self._fetch is not None:
            fetched = self._fetch(sequence, matched)
            if fetched == "wait":
                return "parked"
            if fetched == "loaded":
                return self._admit(sequence)
        del self._waiting[sequence.request.request_id]
        if needed > cache.pool.free_blocks and not self._touched:
            # The waiting sequences will soon use these blocks: evict them after all others.
            self._touched = True
            for other in sorted(self._waiting.values(), key=self.rank, reverse=True):
                cache.touch(other.chain, other.cached_blocks_hint)
        self._running.start(sequence, matched, needed)
        return verdict
