"""A whole simulated run: requests arrive, routers decide, replicas compute, feeds carry the events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from benchmarks.common.report import percentile
from benchmarks.common.virtual_clock import VirtualClock
from benchmarks.simulation.front_door import RAY_PREFIX, RayPrefixTree, SimulatedRouter
from benchmarks.simulation.replica import Job, SimulatedReplica
from benchmarks.simulation.settings import ClusterSettings, Contender, SimulatedRequest
from router.protocol.events import Event, LoadReport
from router.protocol.request import Decision


@dataclass(slots=True)
class Outcome:
    """Times by request number, and the tokens of all requests."""

    ttft_s: dict[int, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    pulled_tokens: int = 0
    rerouted: int = 0

    def summary(self) -> dict[str, float]:
        """Return rates and times. ``hit_rate`` counts pulled tokens as cached."""
        times = list(self.ttft_s.values())
        return {
            "hit_rate": self.cached_tokens / self.prompt_tokens,
            "pulled_rate": self.pulled_tokens / self.prompt_tokens,
            "ttft_mean_s": sum(times) / len(times),
            "ttft_p50_s": percentile(times, 50),
            "ttft_p90_s": percentile(times, 90),
            "ttft_p99_s": percentile(times, 99),
            "rerouted_rate": self.rerouted / len(times),
            "requests": len(times),
        }


class Cluster:
    """Replicas and routers on one clock, for a single run."""

    def __init__(self, settings: ClusterSettings, contender: Contender) -> None:
        self.settings, self.contender = settings, contender
        self.clock = VirtualClock()
        self.outcome = Outcome()
        self.replicas: dict[str, SimulatedReplica] = {}
        rates = settings.prefill_rates or (settings.prefill_tokens_per_s,)
        for number in range(settings.replicas):
            name = f"replica-{settings.seed}-{number:04d}"
            self.replicas[name] = SimulatedReplica(
                name,
                replace(settings, prefill_tokens_per_s=rates[number % len(rates)]),
                self.clock,
                self.replicas,
                shortest_first=contender.shortest_first,
                pulls=contender.pull,
                admits=contender.admission,
                on_first_token=self._first_token,
                on_end=lambda job: self.on_end(job),
                publish=self._publish,
            )
        names = list(self.replicas)
        tree = RayPrefixTree(names) if contender.policy == RAY_PREFIX else None
        self.doors = {
            name: SimulatedRouter(name, names, settings, contender, self.clock, tree)
            for name in (f"router-{number}" for number in range(settings.routers))
        }
        for name, replica in self.replicas.items():
            self._deliver(name, (replica.report(),))
        self.on_end: Callable[[Job], None] = lambda _: None
        self._rng = Random(settings.seed)

    def run(self, requests: Sequence[SimulatedRequest]) -> Outcome:
        """Answer all requests."""
        for request in requests:
            self.clock.at(request.trace.arrival_s / self.settings.speed, partial(self.send, request))
        self.clock.run()
        self.outcome.rerouted = sum(door.core.counters.rerouted for door in self.doors.values())
        return self.outcome

    def send(self, request: SimulatedRequest) -> None:
        """Send a request now, through a random router."""
        self._rng.choice(list(self.doors.values())).send(request, self._submit)

    def _submit(self, request: SimulatedRequest, decision: Decision) -> LoadReport | None:
        return self.replicas[decision.replica_id].submit(request, decision)

    def close(self, tenant: str, name: str) -> None:
        """End a session on every replica."""
        for replica in self.replicas.values():
            replica.close(tenant, name)

    def _first_token(self, job: Job) -> None:
        number = job.request.number
        assert number not in self.outcome.ttft_s
        self.outcome.ttft_s[number] = job.finish_s - job.arrival_s
        self.outcome.prompt_tokens += job.request.trace.prompt_tokens
        self.outcome.cached_tokens += job.cached_tokens
        self.outcome.pulled_tokens += min(job.pulled_tokens, job.cached_tokens)
        self.doors[job.decision.router_id].core.release(job.decision)

    def _publish(self, replica_id: str, events: tuple[Event, ...]) -> None:
        if self.settings.feed_delay_s:
            self.clock.after(self.settings.feed_delay_s, lambda: self._deliver(replica_id, events))
        else:
            self._deliver(replica_id, events)

    def _deliver(self, replica_id: str, events: tuple[Event, ...]) -> None:
        for door in self.doors.values():
            door.core.apply(replica_id, events)


def unlimited(requests: Sequence[SimulatedRequest], settings: ClusterSettings) -> Outcome:
    """Return the bound of all policies: one unlimited cache for all replicas, and no queue."""
    outcome, size = Outcome(), settings.block_size
    seen: set[bytes] = set()
    for request in requests:
        prompt_tokens, prefixes, hits = request.trace.prompt_tokens, request.prefixes(), 0
        while hits < (prompt_tokens - 1) // size and prefixes[hits] in seen:
            hits += 1
        seen.update(prefixes)
        outcome.ttft_s[request.number] = (prompt_tokens - hits * size) / settings.prefill_tokens_per_s
        outcome.prompt_tokens += prompt_tokens
        outcome.cached_tokens += hits * size
    return outcome
