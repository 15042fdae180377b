"""The load of one engine as routers see it: work queued, by router, and measured rates.

Owns the figures between two steps, so that a request counts from the moment it was submitted. Knows nothing of
policies. Not thread-safe: the engine's lock guards it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from router.events import LoadReport, RouterShare
from serve_app.engine.meters import EngineMeters
from serve_app.engine.protocol import EngineSettings
from serve_app.engine.scheduler import Scheduler
from serve_app.engine.sequence import Sequence

ROUTERS_REMEMBERED = 256
"""Routers whose last reservation is kept; the one unheard of for longest is dropped first."""

_UNKNOWN_RETRY_S = 1.0


class LoadView:
    """Queued prefill tokens in all and by router, refreshed every step."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._queued: dict[str, int] = {}
        self._reservations: OrderedDict[str, int] = OrderedDict()
        self._running = 0
        self._waiting = 0
        self._prefill_tokens_per_s = 0.0
        self._decode_step_s = 0.0

    def arrived(self, sequence: Sequence) -> None:
        """Count a request that was just submitted."""
        request = sequence.request
        self._waiting += 1
        self._add(sequence)
        if request.router_id:
            last = self._reservations.get(request.router_id, 0)
            self._reservations[request.router_id] = max(last, request.reservation)
            self._reservations.move_to_end(request.router_id)
            if len(self._reservations) > ROUTERS_REMEMBERED:
                self._reservations.popitem(last=False)

    def update(self, scheduler: Scheduler, meters: EngineMeters, inbox: Collection[Sequence]) -> None:
        """Recount after a step was settled or the inbox taken in; ``inbox``: what arrived since."""
        self._queued.clear()
        self._running, self._waiting = scheduler.running_count, scheduler.waiting_count + len(inbox)
        for line in (scheduler.waiting, scheduler.running, inbox):
            for sequence in line:
                if sequence.prefilling:
                    self._add(sequence)
        self._prefill_tokens_per_s = meters.prefill_tokens_per_s
        self._decode_step_s = meters.decode_step_s

    def report(self) -> LoadReport:
        """Return the load as one message."""
        routers = {**dict.fromkeys(self._reservations, 0), **{r: n for r, n in self._queued.items() if r}}
        return LoadReport(
            queued_prefill_tokens=sum(self._queued.values()),
            running_sequences=self._running,
            waiting_sequences=self._waiting,
            max_running_sequences=self._settings.max_num_seqs,
            max_waiting_sequences=self._settings.max_waiting_requests,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            decode_step_s=self._decode_step_s,
            shares=tuple(RouterShare(r, self._reservations.get(r, 0), n) for r, n in routers.items()),
        )

    def retry_after_s(self) -> float:
        """Return when a refused request might fit: the time to compute half of what is queued."""
        if self._prefill_tokens_per_s <= 0.0:
            return _UNKNOWN_RETRY_S
        return max(0.1, sum(self._queued.values()) / self._prefill_tokens_per_s / 2)

    def _add(self, sequence: Sequence) -> None:
        router_id = sequence.request.router_id
        self._queued[router_id] = self._queued.get(router_id, 0) + sequence.uncached_tokens(self._settings.block_size)
