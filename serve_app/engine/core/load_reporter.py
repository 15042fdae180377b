"""One engine's load as routers see it: queued work and measured rates. The engine's lock guards it."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from router.protocol.events import LoadReport
from serve_app.engine.reports import EngineMeters, LoadReports, retry_after_s
from serve_app.engine.scheduling.scheduler import Scheduled, Scheduler, yields
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings

_LAST = (inf, inf)


@dataclass(slots=True)
class _Work:
    """The rest of a prefill. ``rank``: see ``Scheduler.rank``; infinite if it waits for more than its turn.

    ``under_way``: tokens in the running step. ``waits``: whether it counts as a waiting sequence. ``contended``: the
    tenants' turns decide whether it or another sequence computes its next block. ``passes``: at its tenant's turn it
    will wait for another sequence's block, so a newcomer of the tenant has that turn.
    """

    tenant: str
    tokens: int
    rank: tuple[float, float]
    waits: bool
    yields: bool = False
    under_way: int = 0
    contended: bool = False
    passes: bool = False


class LoadReporter:
    """Queued prefill tokens in total, and those that no newcomer overtakes; updated every step."""

    def __init__(self, settings: EngineSettings, meters: EngineMeters, scheduler: Scheduler) -> None:
        self.tenants = len(settings.tenant_shares)
        """The number of configured tenants."""
        self._settings = settings
        self._meters = meters
        self._scheduler = scheduler
        self._work: dict[str, _Work] = {}
        self._turns: dict[str, int] = {}
        self._reports = LoadReports(settings.max_num_seqs, settings.max_waiting_requests, lambda: meters.prefill_rate)
        self._arrived: dict[str, SequenceState] = {}
        self.running = 0
        self.waiting = 0

    def arrived(self, sequence: SequenceState) -> None:
        """Count a submitted request that is not in the scheduler yet."""
        request = sequence.request
        self._arrived[request.request_id] = sequence
        self.waiting += 1
        self._add(sequence, _LAST, waits=True)
        self._reports.arrived(request.decision)

    def entered(self, sequence: SequenceState) -> None:
        """Note that a request is in the scheduler now."""
        del self._arrived[sequence.request.request_id]

    def update(self) -> None:
        """Recount after a step was settled or requests entered."""
        scheduler = self._scheduler
        self._work.clear()
        self.running, self.waiting = len(scheduler.running), len(scheduler.waiting) + len(self._arrived)
        for sequence in scheduler.running:
            if sequence.computed < sequence.prefill_tokens:
                self._add(sequence, scheduler.rank(sequence), waits=False)
        for sequence in (*scheduler.waiting, *self._arrived.values()):
            self._add(sequence, _LAST, waits=True)
        first: dict[bytes, _Work] = {}
        for sequence in sorted(scheduler.ready(), key=scheduler.rank):
            work, missing = self._work[sequence.request.request_id], scheduler.missing_block(sequence)
            if missing and scheduler.pending.has(missing):
                work.passes = True
                continue  # it will wait for the sequence that computes this block
            other = first.setdefault(missing, work) if missing else work
            if other.tenant != work.tenant:
                other.contended = work.contended = True
            if other is work or work.contended:
                work.rank = scheduler.rank(sequence)
        self._know_turns()

    def begin_step(self, chosen: Collection[Scheduled]) -> None:
        """Note the tokens that the starting step computes: later arrivals wait for all of them."""
        self._know_turns()
        for item in chosen:
            work = self._work.get(item.sequence.request.request_id)
            if work is not None:
                work.under_way = min(item.tokens, work.tokens)

    def report(self, now_s: float) -> LoadReport:
        """Return the load as one message."""
        return self._reports.report(
            now_s,
            queued_tokens=self._queued_before_others(),
            running=self.running,
            waiting=self.waiting,
            committed=self._committed(now_s),
        )

    def retry_after_s(self) -> float:
        """Return when a refused request might fit."""
        return retry_after_s(self._queued_tokens(), self._meters.prefill_tokens_per_s)

    def _committed(self, now_s: float) -> tuple[int, int]:
        """Return the tokens computed before a one-token request that arrives now, and their waiting sequences.

        They are the rest of the step, and work too old or too urgent to be overtaken within its tenant. With several
        tenants the next request may be any tenant's: the result is the least that any of them would find ahead.
        """
        latest_rank = self._scheduler.next_rank(now_s)
        under_way = sequences = 0
        queued: Counter[str] = Counter()
        old: Counter[str] = Counter()
        for work in self._work.values():
            rest = 0 if work.contended else work.tokens - work.under_way
            is_old = work.rank <= latest_rank
            under_way += work.under_way
            if work.rank < _LAST:
                queued[work.tenant] += rest
                old[work.tenant] += rest if is_old else 0
            elif work.passes:
                queued[work.tenant] += 0
            if work.waits and not work.contended and (is_old or not rest):
                sequences += 1
        if self.tenants <= 1:
            return under_way + old.total(), sequences
        turns = sum(min(tokens, self._turns.get(tenant, 0)) for tenant, tokens in queued.items())
        return under_way + min([turns, *(old[tenant] for tenant in queued)]), sequences

    def _know_turns(self) -> None:
        if self.tenants <= 1:  # there are no turns
            return
        running = self._scheduler.running
        decodes = Counter([each.request.tenant for each in running if each.computed >= each.prefill_tokens])
        self._turns = self._scheduler.fair_queue.coming({work.tenant for work in self._work.values()}, decodes)

    def _queued_before_others(self) -> int:
        """Return the queued tokens that may delay a newcomer: of those that yield, only the step's."""
        return sum(work.under_way if work.yields else work.tokens for work in self._work.values())

    def _queued_tokens(self) -> int:
        return sum(work.tokens for work in self._work.values())

    def _add(self, sequence: SequenceState, rank: tuple[float, float], *, waits: bool) -> None:
        request = sequence.request
        tokens = sequence.uncached_tokens(self._settings.block_size)
        self._work[request.request_id] = _Work(request.tenant, tokens, rank, waits, yields(sequence))
