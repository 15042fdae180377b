"""One simulated replica: the real prefix cache index, a queue of jobs, and a cost model instead of a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from msgspec import structs

from benchmarks.common.trace import token_ids_of
from benchmarks.common.virtual_clock import VirtualClock
from benchmarks.simulation.settings import SCOPE, ClusterSettings, SimulatedRequest
from router.policies import is_outdated
from router.protocol.block_hash import HASH_BYTES, TokenArray, common_blocks
from router.protocol.events import Event, LoadReport
from router.protocol.request import Decision
from router.settings import DEFAULTS
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.reports import LoadReports, PrefillRate
from serve_app.engine.scheduling.scheduler import AGING_SHARE, PREFILL_S
from serve_app.replica.reporter import NEWS_PAUSE_S
from serve_app.replica.session_gate import Admission
from serve_app.sessions import Sessions

MIN_PULL_TOKENS = DEFAULTS.scoring.min_pull_tokens


@dataclass(slots=True)
class Job:
    """A request at its replica. ``joined``: jobs that wait for its pull; ``held``: whether its session has to wait.

    ``uncached_tokens``: a hint until the job starts, then its remaining tokens.
    """

    request: SimulatedRequest
    decision: Decision
    arrival_s: float
    token_ids: TokenArray
    uncached_tokens: int = 0
    held_blocks: int = 0
    pulling: bool = False
    held: bool = False
    joined: list[Job] = field(default_factory=list)
    pulled_tokens: int = 0
    cached_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    start_s: float = 0.0
    finish_s: float = 0.0


@dataclass(eq=False)
class SimulatedReplica:
    """A replica in a cluster of ``peers``. ``admits``: sessions wait for capacity."""

    replica_id: str
    settings: ClusterSettings
    clock: VirtualClock
    peers: dict[str, SimulatedReplica]
    shortest_first: bool
    pulls: bool
    admits: bool
    on_first_token: Callable[[Job], None]
    on_end: Callable[[Job], None]
    publish: Callable[[str, tuple[Event, ...]], None]
    decoding: int = 0
    returning: Callable[[], Iterable[bytes]] = tuple
    """Only for an oracle: the paused sessions' prompts, as chains, the last to return first. Evicted in this order."""
    waiting: list[Job] = field(default_factory=list)
    current: Job | None = None
    _overtaken: list[Job] = field(default_factory=list)
    _link_free_s: float = 0.0
    _report_due_s: float = inf
    _look_s: float = inf

    def __post_init__(self) -> None:
        settings = self.settings
        self._reports = LoadReports(0, 0, lambda: PrefillRate(settings.prefill_tokens_per_s))
        self.cache = PrefixCache(settings.blocks, settings.block_size)
        self.sessions = Sessions(settings.block_size, self.clock, lambda: settings.prefill_tokens_per_s)
        self._admission = Admission(
            self.sessions,
            settings.blocks * settings.block_size,
            pinned_tokens=lambda: 0,
            clock=self.clock,
            wait_s=settings.session_wait_s if self.admits else 0.0,
        )

    def submit(self, request: SimulatedRequest, decision: Decision) -> LoadReport | None:
        """Accept a request, or return a load for another decision. Raises ValueError for an overlong request."""
        if self._blocks_of(request) > self.settings.blocks:
            raise ValueError(f"request {request.number} needs more blocks than a replica has")
        if decision.queued_tokens is not None:
            load = self.report()
            if is_outdated(decision, load):
                return load
        tokens = token_ids_of(request.trace.hash_ids, request.trace.prompt_tokens, self.settings.block_size)
        job = Job(request, decision, request.trace.arrival_s / self.settings.speed, tokens)
        self._reports.arrived(decision)
        self._hint(job)
        self.waiting.append(job)
        size = self.settings.block_size
        session = self.sessions.begin(
            str(request.number), request.trace.tenant, request.block_hashes, len(tokens), job.held_blocks * size,
            request.session,
        )  # fmt: skip
        pulled = max(0, decision.pull_tokens - job.held_blocks * size) if decision.pull_from else 0
        job.held = self._admission.waits(session, job.uncached_tokens - pulled, lambda: self._cached_tokens(job))
        self._admit_sessions()
        if not job.held and not self._join_pull(job) and decision.pull_from:
            self._begin_pull(job)
        self._start_next()
        self._report()
        return None

    def report(self) -> LoadReport:
        """Return the current load. The rest of a running prefill counts as waiting."""
        if self.current is not None:
            self._account(self.current)
        started = [*self._overtaken, *([self.current] if self.current is not None else [])]
        unfinished = [*started, *self.waiting]
        if self.shortest_first:  # like our engines: the rest of a step, and jobs that are too old to be overtaken
            step_tokens = round(PREFILL_S * self.settings.prefill_tokens_per_s)
            committed = min(self.current.uncached_tokens, step_tokens) if self.current is not None else 0
            committed += sum(
                job.uncached_tokens
                for job in unfinished
                if job is not self.current and self._rank(job) <= self.clock.now_s
            )
        else:
            committed = sum(job.uncached_tokens for job in started)
        report = self._reports.report(
            self.clock.now_s,
            queued_tokens=sum(job.uncached_tokens for job in unfinished),
            running=self.decoding,
            waiting=len(unfinished),
            committed=(committed, 1),
        )
        return structs.replace(report, pull_tokens_per_s=self.settings.pull_tokens_per_s if self.pulls else 0.0)

    def _report(self) -> None:
        """Publish cache events at once, and the load together with other changes of the next moment."""
        events = self.cache.take_events()
        if events:
            self.publish(self.replica_id, tuple(events))
        self._report_load_after(NEWS_PAUSE_S)

    def _report_load_after(self, pause_s: float) -> None:
        due_s = self.clock.now_s + pause_s
        if due_s < self._report_due_s:
            self._report_due_s = due_s
            self.clock.at(due_s, lambda: self._report_load(due_s))

    def _report_load(self, due_s: float) -> None:
        if due_s != self._report_due_s:  # an earlier report replaced this one
            return
        self._report_due_s = inf
        self.publish(self.replica_id, (self.report(),))
        if self.current is not None:
            self._report_load_after(self.settings.report_interval_s)

    def _blocks_of(self, request: SimulatedRequest) -> int:
        return -(-(request.trace.prompt_tokens + request.trace.output_tokens) // self.settings.block_size)

    def _hint(self, job: Job) -> None:
        """Estimate the cached tokens of a job's prompt, with two look-ups if nothing changed."""
        cache, chain = self.cache, job.request.block_hashes
        limit = cache.reusable_blocks(job.request.trace.prompt_tokens)
        held = job.held_blocks
        if held and not cache.index.held(chain[HASH_BYTES * (held - 1) : HASH_BYTES * held]):
            held = cache.index.count_held(chain, held)
        elif held < limit and cache.index.held(chain[HASH_BYTES * held : HASH_BYTES * (held + 1)]):
            held = cache.index.count_held(chain, limit)
        job.held_blocks = held
        if not job.pulling:
            job.uncached_tokens = job.request.trace.prompt_tokens - held * self.settings.block_size

    def _cached_tokens(self, job: Job) -> int:
        self._hint(job)
        return job.held_blocks * self.settings.block_size

    def _start_next(self) -> None:
        """Compute the first job. Our scheduler lets a shorter prompt overtake a running prefill."""
        if self.current is not None and not self.shortest_first:
            return
        self._admit_sessions()
        ready = [job for job in self.waiting if not job.pulling and not job.held]
        for job in ready:
            self._hint(job)
        if self.current is not None:
            self._account(self.current)
        started = [*self._overtaken, *([self.current] if self.current is not None else [])]
        if not ready and not self._overtaken:
            return
        job = min([*started, *ready], key=self._rank) if self.shortest_first else ready[0]
        if job is self.current:
            return
        if job in ready and not self._admit(job):
            if self.current is not None or not self._overtaken:
                return  # no other job overtakes, or this one might wait forever
            job = min(self._overtaken, key=self._rank)
        if self.current is not None:
            self._overtaken.append(self.current)
        if job in self._overtaken:
            self._overtaken.remove(job)
        self.current = job
        slowed = 1.0 + self.settings.decode_weight * self.decoding
        job.start_s = self.clock.now_s
        job.finish_s = due_s = job.start_s + slowed * job.uncached_tokens / self.settings.prefill_tokens_per_s
        self.clock.at(due_s, lambda: self._finish(job, due_s))

    def _admit_sessions(self) -> None:
        """Start the sessions that fit now, and check again when there may be more capacity."""
        started = set(self._admission.admitted())
        for job in self.waiting:
            job.held = job.held and str(job.request.number) not in started
        look_s = self._admission.look_again_s()
        if look_s < inf and look_s != self._look_s:
            self._look_s = look_s
            self.clock.at(max(look_s, self.clock.now_s) + 0.001, self._start_next)

    def _admit(self, job: Job) -> bool:
        """Remove a job from the queue and allocate its blocks, if there are enough."""
        cache, size = self.cache, self.settings.block_size
        matched = cache.match(SCOPE, job.token_ids, job.request.block_hashes)
        needed = self._blocks_of(job.request) - len(matched)
        if needed > cache.available_blocks - sum(1 for block in matched if cache.pool.is_idle(block)):
            return False
        cache.acquire(matched)
        if self.shortest_first and needed > cache.pool.free_blocks:  # like our scheduler
            for chain in self.returning():
                cache.touch(chain, cache.index.count_held(chain, len(chain) // HASH_BYTES))
            for other in sorted(self.waiting, key=self._rank, reverse=True):
                cache.touch(other.request.block_hashes, other.held_blocks)
        job.blocks = [*matched, *cache.allocate(needed)]
        job.cached_tokens = len(matched) * size
        job.held_blocks = len(matched)
        job.uncached_tokens = job.request.trace.prompt_tokens - job.cached_tokens
        self.waiting.remove(job)
        return True

    def _account(self, job: Job) -> None:
        """Update the remaining tokens of the running job."""
        now_s = self.clock.now_s
        if job.finish_s > job.start_s:
            left = (job.finish_s - now_s) / (job.finish_s - job.start_s)
            job.uncached_tokens = max(1, round(left * job.uncached_tokens)) if left > 0 else 0
        job.start_s = now_s

    def _rank(self, job: Job) -> float:
        return job.arrival_s + job.uncached_tokens / (AGING_SHARE * self.settings.prefill_tokens_per_s)

    def _finish(self, job: Job, due_s: float) -> None:
        if job is not self.current or job.finish_s != due_s:
            return  # another job has overtaken it
        full = job.request.trace.prompt_tokens // self.settings.block_size
        self.cache.publish(SCOPE, job.token_ids, job.request.block_hashes, job.blocks, job.held_blocks, full)
        self.current = None
        self.decoding += 1
        self.on_first_token(job)
        self.sessions.first_token(str(job.request.number))
        output_s = job.request.trace.output_tokens * self.settings.decode_token_s
        self.clock.after(output_s, lambda: self._end(job, job.blocks))
        self._start_next()
        self._report()

    def _end(self, job: Job, blocks: list[int]) -> None:
        self.cache.release(blocks)
        self.decoding -= 1
        self.sessions.end(str(job.request.number), job.request.trace.output_tokens)
        self._start_next()
        self._report()
        self.on_end(job)

    def close(self, tenant: str, name: str) -> None:
        """End a session, like a replica: its own blocks go first then."""
        for session in self.sessions.close(tenant, [name]):
            first = -(-session.shared_tokens // self.settings.block_size)
            self.cache.demote(self.cache.index.line_through(session.marks[0][1])[first:])
        self._start_next()

    def _join_pull(self, job: Job) -> bool:
        """Let a job wait for another job's pull if that copies enough of its prompt."""
        size = self.settings.block_size
        for other in self.waiting:
            if other.pulling and other is not job and other.decision.pull_from:
                common = min(
                    common_blocks(other.request.block_hashes, job.request.block_hashes) * size,
                    other.decision.pull_tokens,
                )
                if common - job.held_blocks * size >= MIN_PULL_TOKENS:
                    other.joined.append(job)
                    job.pulling = True
                    job.uncached_tokens = max(job.request.trace.prompt_tokens - common, 1)
                    return True
        return False

    def _begin_pull(self, job: Job) -> None:
        """Copy the decision's prefix; pulls share this replica's link one after another."""
        job.pulling = True
        job.uncached_tokens = job.request.trace.prompt_tokens - max(
            job.decision.pull_tokens, job.held_blocks * self.settings.block_size
        )
        self.clock.at(max(self.clock.now_s, self._link_free_s), lambda: self._copy(job))
        missing = max(job.decision.pull_tokens - job.held_blocks * self.settings.block_size, 0)
        self._link_free_s = max(self.clock.now_s, self._link_free_s) + missing / self.settings.pull_tokens_per_s

    def export(self, token_ids: TokenArray, chain: bytes, first: int, last: int) -> int:
        """Export blocks ``first`` to ``last`` - 1 to a pull, like ``PrefixTransfer``; return their end.

        From then on, blocks of this prefix alone are evicted first: the conversation has moved.
        """
        held = self.cache.match(SCOPE, token_ids, chain)[:last]
        self.cache.acquire(held)
        self.cache.release(held)
        if len(held) > first:
            self.cache.demote(held)
        return len(held)

    def _copy(self, job: Job) -> None:
        """Copy as many blocks as the holder still has and this pool can hold, and reserve their space meanwhile."""
        cache, size, chain = self.cache, self.settings.block_size, job.request.block_hashes
        matched = cache.match(SCOPE, job.token_ids, chain)
        holder = self.peers.get(job.decision.pull_from)
        wanted = job.decision.pull_tokens // size
        end = 0 if holder is None else holder.export(job.token_ids, chain, len(matched), wanted)
        idle_hits = sum(1 for block in matched if cache.pool.is_idle(block))
        missing = min(end - len(matched), cache.available_blocks - idle_hits)
        if missing <= 0:
            self._ready(job)
            return
        cache.acquire(matched)
        blocks = [*matched, *cache.allocate(missing)]

        def arrived() -> None:
            cache.publish(SCOPE, job.token_ids, chain, blocks, len(matched), len(blocks))
            cache.release(blocks)
            job.pulled_tokens = missing * size
            self._ready(job)

        self.clock.after(missing * size / self.settings.pull_tokens_per_s, arrived)

    def _ready(self, job: Job) -> None:
        for waiting in (job, *job.joined):
            waiting.pulling = False
            self._hint(waiting)
        self._start_next()
        self._report()
