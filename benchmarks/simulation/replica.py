"""One simulated replica: the real prefix cache index, a line of jobs, and a cost model instead of a forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from benchmarks.common.trace import token_ids_of
from benchmarks.common.virtual_clock import VirtualClock
from benchmarks.simulation.settings import SCOPE, ClusterSettings, SimulatedRequest
from router.policy.recheck import is_outdated
from router.protocol.block_hash import HASH_BYTES, TokenArray, common_blocks
from router.protocol.events import Event, LoadReport
from router.protocol.request import Decision
from router.settings import PolicySettings
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.scheduling.scheduler import AGING_SHARE
from serve_app.replica.reporter import NEWS_PAUSE_S

MIN_PULL_TOKENS = PolicySettings().min_pull_tokens


@dataclass(slots=True)
class Job:
    """A request at its replica. ``uncached_tokens``: a hint until the prefill starts; ``joined``: to its pull."""

    request: SimulatedRequest
    decision: Decision
    arrival_s: float
    token_ids: TokenArray
    uncached_tokens: int = 0
    held_blocks: int = 0
    pulling: bool = False
    joined: list[Job] = field(default_factory=list)
    pulled_tokens: int = 0
    cached_tokens: int = 0
    start_s: float = 0.0
    finish_s: float = 0.0


class SimulatedReplica:
    """A replica of a cluster of ``peers``."""

    def __init__(
        self,
        replica_id: str,
        settings: ClusterSettings,
        clock: VirtualClock,
        peers: dict[str, SimulatedReplica],
        *,
        shortest_first: bool,
        pulls: bool,
        on_first_token: Callable[[Job], None],
        on_end: Callable[[Job], None],
        publish: Callable[[str, tuple[Event, ...]], None],
    ) -> None:
        self.replica_id = replica_id
        self.cache = PrefixCache(settings.blocks, settings.block_size)
        self.decoding = 0
        self.waiting: list[Job] = []
        self.current: Job | None = None
        self._settings = settings
        self._clock = clock
        self._peers = peers
        self._shortest_first = shortest_first
        self._pulls = pulls
        self._on_first_token = on_first_token
        self._on_end = on_end
        self._publish = publish
        self._link_free_s = 0.0
        self._report_due_s = inf
        self._last_reservation: dict[str, int] = {}

    def submit(self, request: SimulatedRequest, decision: Decision) -> LoadReport | None:
        """Take a request, or return a load by which the router decides again. Raises ValueError for a long one."""
        if self._blocks_of(request) > self._settings.blocks:
            raise ValueError(f"request {request.number} needs more blocks than a replica has")
        if decision.queued_tokens is not None:
            load = self.report()
            if is_outdated(decision, load):
                return load
        tokens = token_ids_of(request.trace.hash_ids, request.trace.prompt_tokens, self._settings.block_size)
        job = Job(request, decision, request.trace.arrival_s / self._settings.speed, tokens)
        self._last_reservation[decision.router_id] = decision.reservation
        self._hint(job)
        self.waiting.append(job)
        if not self._join_pull(job) and decision.pull_from:
            self._begin_pull(job)
        self._start_next()
        self._report()
        return None

    def report(self) -> LoadReport:
        """Return the load now. The rest of the prompt being computed counts as waiting."""
        committed = 0
        if self.current is not None:
            job = self.current
            left = (job.finish_s - self._clock.now_s) / (job.finish_s - job.start_s)
            committed = round(left * job.uncached_tokens)
        waiting = len(self.waiting) + (self.current is not None)
        return LoadReport(
            queued_prefill_tokens=sum(job.uncached_tokens for job in self.waiting) + committed,
            running_sequences=self.decoding,
            waiting_sequences=waiting,
            max_running_sequences=0,
            max_waiting_sequences=0,
            prefill_tokens_per_s=self._settings.prefill_tokens_per_s,
            admitted=dict(self._last_reservation),
            committed_prefill_tokens=committed,
            pull_tokens_per_s=self._settings.pull_tokens_per_s if self._pulls else 0.0,
            taken_at_s=self._clock.now_s,
        )

    def _report(self) -> None:
        """Tell cache events at once, and the load with other changes of the next moment."""
        events = self.cache.take_events()
        if events:
            self._publish(self.replica_id, tuple(events))
        self._report_load_after(NEWS_PAUSE_S)

    def _report_load_after(self, pause_s: float) -> None:
        due_s = self._clock.now_s + pause_s
        if due_s < self._report_due_s:
            self._report_due_s = due_s
            self._clock.at(due_s, lambda: self._report_load(due_s))

    def _report_load(self, due_s: float) -> None:
        if due_s != self._report_due_s:  # an earlier one has been sent meanwhile
            return
        self._report_due_s = inf
        self._publish(self.replica_id, (self.report(),))
        if self.current is not None:
            self._report_load_after(self._settings.report_interval_s)

    def _blocks_of(self, request: SimulatedRequest) -> int:
        return -(-(request.trace.prompt_tokens + request.trace.output_tokens) // self._settings.block_size)

    def _hint(self, job: Job) -> None:
        """Guess the cached tokens of a job's prompt, at two look-ups when nothing changed."""
        cache, chain = self.cache, job.request.block_hashes
        limit = cache.reusable_blocks(job.request.trace.prompt_tokens)
        held = job.held_blocks
        if held and not cache.index.held(chain[HASH_BYTES * (held - 1) : HASH_BYTES * held]):
            held = cache.index.count_held(chain, held)
        elif held < limit and cache.index.held(chain[HASH_BYTES * held : HASH_BYTES * (held + 1)]):
            held = cache.index.count_held(chain, limit)
        job.held_blocks = held
        if not job.pulling:
            job.uncached_tokens = job.request.trace.prompt_tokens - held * self._settings.block_size

    def _start_next(self) -> None:
        if self.current is not None:
            return
        ready = [job for job in self.waiting if not job.pulling]
        for job in ready:
            self._hint(job)
        if not ready:
            return
        job = min(ready, key=self._rank) if self._shortest_first else ready[0]
        cache, size = self.cache, self._settings.block_size
        matched = cache.match(SCOPE, job.token_ids, job.request.block_hashes)
        needed = self._blocks_of(job.request) - len(matched)
        if needed > cache.available_blocks - sum(1 for block in matched if cache.pool.is_idle(block)):
            return  # nobody overtakes, or the job might wait for ever
        cache.acquire(matched)
        if self._shortest_first and needed > cache.pool.free_blocks:  # as our scheduler does
            for other in sorted(self.waiting, key=self._rank, reverse=True):
                cache.touch(other.request.block_hashes, other.held_blocks)
        blocks = [*matched, *cache.allocate(needed)]
        job.cached_tokens = len(matched) * size
        job.uncached_tokens = job.request.trace.prompt_tokens - job.cached_tokens
        slowed = 1.0 + self._settings.decode_weight * self.decoding
        job.start_s = self._clock.now_s
        job.finish_s = job.start_s + slowed * job.uncached_tokens / self._settings.prefill_tokens_per_s
        self.waiting.remove(job)
        self.current = job
        self._clock.at(job.finish_s, lambda: self._finish(job, blocks, len(matched)))

    def _rank(self, job: Job) -> float:
        return job.arrival_s + job.uncached_tokens / (AGING_SHARE * self._settings.prefill_tokens_per_s)

    def _finish(self, job: Job, blocks: list[int], hits: int) -> None:
        full = job.request.trace.prompt_tokens // self._settings.block_size
        self.cache.publish(SCOPE, job.token_ids, job.request.block_hashes, blocks, hits, full)
        self.current = None
        self.decoding += 1
        self._on_first_token(job)
        output_s = job.request.trace.output_tokens * self._settings.decode_token_s
        self._clock.after(output_s, lambda: self._end(job, blocks))
        self._start_next()
        self._report()

    def _end(self, job: Job, blocks: list[int]) -> None:
        self.cache.release(blocks)
        self.decoding -= 1
        self._start_next()
        self._report()
        self._on_end(job)

    def _join_pull(self, job: Job) -> bool:
        """Let a job wait for another one's copy of enough of its prompt."""
        size = self._settings.block_size
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
        """Copy the decision's prefix, one pull after another over this replica's link."""
        job.pulling = True
        job.uncached_tokens = job.request.trace.prompt_tokens - max(
            job.decision.pull_tokens, job.held_blocks * self._settings.block_size
        )
        self._clock.at(max(self._clock.now_s, self._link_free_s), lambda: self._copy(job))
        missing = max(job.decision.pull_tokens - job.held_blocks * self._settings.block_size, 0)
        self._link_free_s = max(self._clock.now_s, self._link_free_s) + missing / self._settings.pull_tokens_per_s

    def export(self, token_ids: TokenArray, chain: bytes, first: int, last: int) -> int:
        """Hand over blocks ``first`` to ``last`` - 1 to a pull, as ``PrefixTransfer`` does; return their end.

        Blocks of this prefix alone are evicted first from then on: the conversation has moved.
        """
        held = self.cache.match(SCOPE, token_ids, chain)[:last]
        self.cache.acquire(held)
        self.cache.release(held)
        if len(held) > first:
            self.cache.demote(held)
        return len(held)

    def _copy(self, job: Job) -> None:
        """Copy as much as the holder still has and this pool has room for, and hold the room meanwhile."""
        cache, size, chain = self.cache, self._settings.block_size, job.request.block_hashes
        matched = cache.match(SCOPE, job.token_ids, chain)
        holder = self._peers.get(job.decision.pull_from)
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

        self._clock.after(missing * size / self._settings.pull_tokens_per_s, arrived)

    def _ready(self, job: Job) -> None:
        for waiting in (job, *job.joined):
            waiting.pulling = False
            self._hint(waiting)
        self._start_next()
        self._report()
