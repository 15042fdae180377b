"""One replica on a virtual clock: the real scheduler and prefix cache over a cost model, so that a run repeats exactly.

In: requests in order of arrival; out: an ``Observer`` is told what was scheduled and which tokens came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.common.virtual_clock import VirtualClock
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.protocol import EngineRequest
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.scheduling.scheduler import Scheduled, Scheduler
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings

VOCAB = 32000


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request, and after how many tokens its client has heard enough."""

    arrival_s: float
    request: EngineRequest
    answer_tokens: int


class Observer(Protocol):
    """Who measures."""

    def arrives(self, request: EngineRequest) -> bool:
        """Return whether the request is taken."""

    def scheduled(self, chosen: Sequence[Scheduled], preempted: int) -> None:
        """One step is about to run."""

    def token(self, sequence: SequenceState) -> None:
        """``sequence`` generated a token, which it does not count yet."""


class VirtualReplica:
    """A new replica; ``clock`` tells its time."""

    def __init__(
        self, settings: EngineSettings, prefill_tokens_per_s: float, shares: Mapping[str, float] | None = None
    ) -> None:
        self.clock = VirtualClock()
        self._cache = PrefixCache(settings.num_blocks, settings.block_size, shares=shares, clock=self.clock)
        self._scheduler = Scheduler(settings, self._cache)
        cost = CostModel(prefill_tokens_per_s=prefill_tokens_per_s, vocab_size=VOCAB)
        self._runner = SimulatedRunner(cost, sleep=self.clock.sleep)

    def run(self, requests: Iterable[TimedRequest], observer: Observer) -> None:
        """Run requests to their ends."""
        clock, scheduler = self.clock, self._scheduler
        coming = deque(requests)
        answer_tokens: dict[str, int] = {}
        while coming or scheduler.waiting_count or scheduler.running_count:
            while coming and coming[0].arrival_s <= clock():
                timed = coming.popleft()
                request = timed.request
                if observer.arrives(request):
                    answer_tokens[request.request_id] = timed.answer_tokens
                    chain = self._cache.prompt_chain(request.scope, request.root, request.token_ids)
                    scheduler.add(SequenceState(request, lambda _: None, chain, timed.arrival_s))
            chosen = scheduler.schedule()
            preempted = len(list(scheduler.preempted))
            if not chosen and not preempted:
                assert coming, "what waits can never start"
                clock.sleep(coming[0].arrival_s - clock())
                continue
            observer.scheduled(chosen, preempted)
            results = self._runner.execute([item.sequence.segment(item.tokens) for item in chosen])
            for item, result in zip(chosen, results, strict=True):
                scheduler.computed(item)
                if result.token is not None:
                    observer.token(item.sequence)
                    name = item.sequence.request.request_id
                    finished = item.sequence.append_token(result.token)
                    if finished or item.sequence.generated_tokens >= answer_tokens[name]:
                        scheduler.remove(name)
            self._cache.take_events()
