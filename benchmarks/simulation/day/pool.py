"""A cluster whose replicas come and go: a start takes its time, and who leaves finishes what it has.

Owns replicas' lives, what they cost, and the routers' view of them. Knows no rule of scaling: ``rule`` is asked at its
own interval. In: requests in order of arrival; out: every request's time to first token, and the pool's size over time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

from benchmarks.common.virtual_clock import VirtualClock
from benchmarks.simulation.day.view import START_S, DayOutcome, Rule
from benchmarks.simulation.front_door import FrontDoor
from benchmarks.simulation.replica import Job, SimulatedReplica
from benchmarks.simulation.settings import ClusterSettings, Contender, SimulatedRequest
from router.observe.demand import RecentTimes
from router.protocol.autoscaling import ReplicaFigures
from router.protocol.events import Event, LoadReport
from router.protocol.request import Decision


@dataclass(slots=True)
class Life:
    """One replica. ``running``: it has started; ``leaving``: it takes no more; ``sequences``: that it has."""

    replica: SimulatedReplica
    born_s: float
    running: bool = False
    leaving: bool = False
    sequences: int = 0


class ElasticPool:
    """Replicas, routers and a rule on one clock; run it once. ``most``: replicas there may be."""

    def __init__(self, settings: ClusterSettings, contender: Contender, rule: Rule, *, first: int, most: int) -> None:
        self.settings = settings
        self.most = most
        self.clock = VirtualClock()
        self.outcome = DayOutcome()
        self.lives: dict[str, Life] = {}
        self.wanted = 0
        self._contender = contender
        self._rule = rule
        self._peers: dict[str, SimulatedReplica] = {}
        self._born = 0
        self._open = 0
        self._ended = False
        self._rng = Random(settings.seed)
        self.doors = {
            name: FrontDoor(name, [], settings, contender, self.clock)
            for name in (f"router-{number}" for number in range(settings.routers))
        }
        for _ in range(first):
            self._run(self._begin())
        self._size(first)

    def figures(self) -> dict[str, ReplicaFigures]:
        """Return what each running replica would report."""
        settings = self.settings
        found = {}
        for name, life in self.lives.items():
            if life.running and not life.leaving:
                replica = life.replica
                queued = replica.queued_tokens
                found[name] = ReplicaFigures(
                    version=0,
                    arrived_tokens=replica.computed_tokens + queued,
                    queued_tokens=queued,
                    prefill_tokens_per_s=settings.prefill_tokens_per_s,
                    running=replica.decoding,
                    waiting=len(replica.waiting),
                    slots=0,
                    pool_tokens=settings.blocks * settings.block_size,
                    used_tokens=replica.cache.pool.used_blocks * settings.block_size,
                    pinned_tokens=0,
                    pin_budget_tokens=0,
                    hands_over=1,
                )
        return found

    def demand(self) -> list[tuple[RecentTimes, int]]:
        """Return by router what its requests of the last minute were like, and the tokens of the working set."""
        return [door.core.demand() for door in self.doors.values()]

    def ongoing(self) -> int:
        """Return the requests that wait, are computed or answered."""
        return sum(life.sequences for life in self.lives.values() if life.running and not life.leaving)

    def run(self, requests: Iterable[SimulatedRequest]) -> DayOutcome:
        """Let every request arrive, then wait until all is done and the rule has made the pool small."""
        self._next(iter(requests))
        self.clock.after(self._rule.interval_s, self._tick)
        self.clock.run()
        for life in self.lives.values():
            self.outcome.replica_s += self.clock.now_s - life.born_s
        return self.outcome

    def _next(self, requests: Iterator[SimulatedRequest]) -> None:
        request = next(requests, None)
        if request is None:
            self._ended = True
            return

        def arrive() -> None:
            self._open += 1
            self._rng.choice(list(self.doors.values())).send(request, self._submit)
            self._next(requests)

        self.clock.at(max(request.trace.arrival_s, self.clock.now_s), arrive)

    def _submit(self, request: SimulatedRequest, decision: Decision) -> LoadReport | None:
        life = self.lives[decision.replica_id]
        load = life.replica.submit(request, decision)
        life.sequences += load is None
        return load

    def _tick(self) -> None:
        now_s, outcome = self.clock.now_s, self.outcome
        wanted = max(1, min(self._rule.target(self, now_s), self.most))
        if wanted != self.wanted:
            self._size(wanted)
        quiet = self._ended and not self._open
        if quiet and not outcome.gone_s:
            outcome.gone_s = now_s
        if quiet and self.wanted == 1:
            outcome.smallest_s = now_s
            return
        if not quiet or now_s < outcome.gone_s + 3 * self._rule.delay_s + 600.0:
            self.clock.after(self._rule.interval_s, self._tick)

    def _size(self, wanted: int) -> None:
        self.wanted = wanted
        self.outcome.sizes.append((self.clock.now_s, wanted))
        staying = [name for name, life in self.lives.items() if not life.leaving]
        for _ in range(wanted - len(staying)):
            name = self._begin()
            self.clock.after(START_S, lambda name=name: self._run(name))  # type: ignore[misc]
        # Serve's order: who does not run yet, then the newest.
        going = sorted(staying, key=lambda name: (self.lives[name].running, -self.lives[name].born_s))
        for name in going[: max(len(staying) - wanted, 0)]:
            self._leave(name)

    def _begin(self) -> str:
        name = f"replica-{self.settings.seed}-{self._born:05d}"
        self._born += 1
        replica = SimulatedReplica(
            name,
            self.settings,
            self.clock,
            self._peers,
            shortest_first=self._contender.shortest_first,
            pulls=self._contender.pull,
            on_first_token=self._first_token,
            publish=self._publish,
            on_end=self._sequence_ended,
        )
        self.lives[name] = Life(replica, self.clock.now_s)
        return name

    def _run(self, name: str) -> None:
        life = self.lives.get(name)
        if life is None or life.leaving:
            return
        life.running = True
        self._peers[name] = life.replica
        self._announce()
        self._publish(name, (life.replica.report(),))

    def _leave(self, name: str) -> None:
        self.lives[name].leaving = True
        self._peers.pop(name, None)
        self._announce()
        self._bury(name)

    def _announce(self) -> None:
        names = [name for name, life in self.lives.items() if life.running and not life.leaving]
        for door in self.doors.values():
            door.replicas(names)

    def _bury(self, name: str) -> None:
        life = self.lives[name]
        if life.leaving and not life.sequences:
            self.outcome.replica_s += self.clock.now_s - life.born_s
            del self.lives[name]

    def _first_token(self, job: Job) -> None:
        outcome = self.outcome
        outcome.ttft_s.append(job.finish_s - job.arrival_s)
        outcome.prompt_tokens += job.request.trace.prompt_tokens
        outcome.cached_tokens += job.cached_tokens
        self.doors[job.decision.router_id].core.release(job.decision)

    def _sequence_ended(self, name: str) -> None:
        self._open -= 1
        self.lives[name].sequences -= 1
        self._bury(name)

    def _publish(self, replica_id: str, events: tuple[Event, ...]) -> None:
        for door in self.doors.values():
            door.take(replica_id, events)
