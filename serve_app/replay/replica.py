"""One simulated replica: steps of prefill and decoding over a pool of segments, in virtual time.

The same discipline as our engines': tenants share a step's prefill, within one the least uncached work runs first, with
aging, and a prompt whose beginning another one is computing waits for it. Equal steps in a row are one event.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, floor

from serve_app.engine.scheduling.fair_queue import LEAST_STEP_TOKENS, QUANTUM_TOKENS
from serve_app.engine.scheduling.scheduler import AGING_SHARE, PREFILL_S
from serve_app.replay.pool import SegmentPool
from serve_app.replay.setup import Rates
from serve_app.replica.pull_rate import PullRate

NOTHING: tuple[int, int] = (-1, 0)

CLOSE, CLOSE_S = 1e-6, 1e-9
"""Parts of a step, and seconds, that rounding makes of nothing."""


class ReplayJob:
    """A request at its replica. ``path``: its segments; ``grown``: the segment and blocks that its answer fills.

    ``left_tokens``: to compute; ``count``: matched segments; ``private_blocks``: taken from the pool and not shared.
    ``pulled_s``: when another replica has sent ``pulled_blocks``, for which the prompt waits.
    """

    __slots__ = (
        "arrival_s", "cached_tokens", "count", "grown", "left_tokens", "limit_blocks", "load_s", "number",
        "output_tokens", "path", "private_blocks", "prompt_tokens", "pulled_blocks", "pulled_s", "rank", "tenant",
    )  # fmt: skip

    def __init__(
        self, number: int, arrival_s: float, prompt_tokens: int, output_tokens: int, tenant: int, path: list[int],
        limit_blocks: int, grown: tuple[int, int] = NOTHING,
    ) -> None:  # fmt: skip
        self.number, self.arrival_s, self.tenant, self.path = number, arrival_s, tenant, path
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens
        self.limit_blocks, self.grown = limit_blocks, grown
        self.left_tokens = prompt_tokens
        self.count = self.private_blocks = self.cached_tokens = self.pulled_blocks = 0
        self.load_s = self.rank = self.pulled_s = 0.0


@dataclass(slots=True)
class _Step:
    """``times`` equal steps of ``step_s``, in which each job gets its tokens."""

    begun_s: float
    step_s: float
    times: int
    shares: list[tuple[ReplayJob, int]]
    tokens: int


class ReplayReplica:
    """A replica. ``wake``: asks for ``tick`` at a moment; ``first_token``, ``ended``: hear of jobs and moments."""

    __slots__ = (
        "_ended",
        "_first_token",
        "_pulling",
        "_served",
        "_started",
        "_step",
        "_v",
        "_v_s",
        "_waiting",
        "_wake",
        "arrived_tokens",
        "block_tokens",
        "computing",
        "decoding",
        "due_s",
        "name",
        "pool",
        "pulls",
        "queued_tokens",
        "rates",
        "running",
        "shortest_first",
        "unfinished",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        rates: Rates,
        pool: SegmentPool,
        block_tokens: int,
        *,
        shortest_first: bool,
        wake: Callable[[ReplayReplica, float], None],
        first_token: Callable[[ReplayReplica, ReplayJob, float], None],
        ended: Callable[[ReplayReplica, ReplayJob, float], None],
    ) -> None:
        self.name, self.rates, self.pool, self.block_tokens = name, rates, pool, block_tokens
        self.shortest_first = shortest_first
        self._wake, self._first_token, self._ended = wake, first_token, ended
        self.due_s = -1.0
        self.queued_tokens = 0
        """Uncached tokens of the jobs without a first token, as of the last step's end."""
        self.arrived_tokens = 0
        self.running = self.unfinished = 0
        self.computing: dict[int, int] = {}
        """By segment: the number of the job that computes it."""
        self.decoding: list[tuple[float, int, ReplayJob]] = []
        self._v = self._v_s = 0.0
        """The tokens that each sequence since the start would have got, and when that was counted."""
        self._waiting: dict[int, list[tuple[float, int, ReplayJob]]] = {}
        self._pulling: list[tuple[float, int, ReplayJob]] = []
        self.pulls = PullRate(rates.pull_tokens_per_s)
        self._started: list[ReplayJob] = []
        self._served: dict[int, float] = {}
        self._step: _Step | None = None

    # What routers see.

    def load(self, now_s: float) -> tuple[int, int]:
        """Return the tokens that are queued, and those of them that nobody overtakes."""
        step = self._step
        if step is None:
            return self.queued_tokens, self.queued_tokens if not self.shortest_first else 0
        part = (now_s - step.begun_s) / step.step_s if step.step_s else 0.0
        done = min(int(part + 1e-9), step.times) * step.tokens  # engines report as of their last step
        queued = max(self.queued_tokens - done, 1)
        if not self.shortest_first:
            return queued, queued
        return queued, min(queued, step.tokens)

    def progress(self) -> tuple[int, float, float, int, int]:
        """Return the tokens queued at the last step's end, when the present steps began, their tokens a second and in
        all, and those of one: what ``load`` counts with.
        """
        step = self._step
        if step is None or not step.tokens or not step.step_s:
            return self.queued_tokens, 0.0, 0.0, 0, 0
        return self.queued_tokens, step.begun_s, step.tokens / step.step_s, step.tokens * step.times, step.tokens

    def step_end_s(self, now_s: float) -> float:
        """Return when the step in progress ends: what is between two steps can be done then."""
        step = self._step
        if step is None or not step.step_s:
            return now_s
        return step.begun_s + max(ceil((now_s - step.begun_s) / step.step_s - CLOSE), 1) * step.step_s

    @property
    def waiting(self) -> int:
        """Jobs without a first token that wait for no other replica's KV."""
        return self.unfinished - self.running - len(self._pulling)

    @property
    def token_s(self) -> float:
        """The seconds between two tokens of each answer, as of now."""
        return self._token_s()

    def used_tokens(self) -> int:
        """Return the pool tokens of running sequences."""
        return (self.pool.capacity - self.pool.available) * self.block_tokens

    # The way of a job.

    def submit(self, job: ReplayJob, now_s: float) -> None:
        """Take a request."""
        self._settle(now_s)
        blocks = min(max(self.pool.match(job.path)[1], job.pulled_blocks), job.limit_blocks)
        job.left_tokens = job.prompt_tokens - blocks * self.block_tokens
        self.queued_tokens += job.left_tokens
        self.arrived_tokens += job.left_tokens
        self.unfinished += 1
        if job.pulled_s > now_s:
            heapq.heappush(self._pulling, (job.pulled_s, job.number, job))
            self.pulls.observe(job.pulled_blocks * self.block_tokens, job.pulled_s - now_s, job.pulled_s)
            self._wake_at(job.pulled_s)
        else:
            self._line_up(job, now_s)

    def _line_up(self, job: ReplayJob, now_s: float) -> None:
        """Let a job wait for its turn to be computed."""
        self._rank(job)
        line = self._waiting.get(job.tenant)
        if line is None:
            self._welcome(job.tenant)
            line = self._waiting[job.tenant] = []
        heapq.heappush(line, (job.rank, job.number, job))
        step = self._step
        if step is None:
            # Decoding goes on: the prefill begins with the next step.
            self._count_tokens(now_s)
            rest = max(ceil(self._v - CLOSE) - self._v, 0.0) * self.rates.decode_s(self.running)
            self._step = _Step(now_s, rest, 1, [], 0)
            self._wake_at(now_s + rest)
        elif step.times > 1 and self._interrupts(job, step):
            self._cut(step, now_s)

    def _welcome(self, tenant: int) -> None:
        """Let a tenant that had nothing to compute begin where the least served of the others are."""
        others = {*self._waiting, *(job.tenant for job in self._started)}
        if others and tenant not in others:
            least = min(self._served.get(other, 0.0) for other in others)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)

    def _settle(self, now_s: float) -> None:
        """Count the steps in a row that are over, but for the last: whoever comes now sees what they have served."""
        step = self._step
        if step is None or step.times == 1:
            return
        over = min(floor((now_s - step.begun_s) / step.step_s + CLOSE), step.times - 1)
        if over > 0:
            self._advance(step, over)
            step.begun_s += over * step.step_s
            step.times -= over

    def _advance(self, step: _Step, times: int) -> list[ReplayJob]:
        """Count what so many of equal steps have computed; return the jobs that need no more."""
        done: list[ReplayJob] = []
        for job, share in step.shares:
            tokens = min(share * times, job.left_tokens)
            self._served[job.tenant] = self._served.get(job.tenant, 0.0) + tokens
            job.left_tokens -= tokens
            self.queued_tokens -= tokens
            if job.left_tokens <= 0:
                done.append(job)
            else:
                self._rank(job)
        return done

    def _cut(self, step: _Step, now_s: float) -> None:
        """End equal steps with the one in progress: the next one is another."""
        step.times = min(step.times, max(ceil((now_s - step.begun_s) / step.step_s - CLOSE), 1))
        self._wake_at(max(step.begun_s + step.times * step.step_s, now_s))

    @staticmethod
    def _interrupts(job: ReplayJob, step: _Step) -> bool:
        first = step.shares[0][0]
        return len(step.shares) > 1 or job.tenant != first.tenant or job.rank < first.rank

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        self.due_s = -1.0
        self._count_tokens(now_s)
        ended = self._end_answers(now_s)
        while self._pulling and self._pulling[0][0] <= now_s + CLOSE_S:
            self._settle(now_s)
            self._line_up(heapq.heappop(self._pulling)[2], now_s)
        step = self._step
        if step is not None and step.times > 1 and ended:
            self._cut(step, now_s)
        if step is not None and step.begun_s + step.times * step.step_s <= now_s + CLOSE_S:
            self._step = None
            self._end_step(step, now_s)
        if self._step is None and (self._waiting or self._started):
            self._begin_step(now_s)
        self._wake_next(now_s)

    def _rank(self, job: ReplayJob) -> None:
        if self.shortest_first:
            job.rank = job.arrival_s + job.left_tokens / (AGING_SHARE * self.rates.prefill_tokens_per_s)
        else:
            job.rank = job.arrival_s

    # Decoding.

    def _token_s(self) -> float:
        step = self._step
        return step.step_s if step is not None and step.tokens else self.rates.decode_s(self.running)

    def _count_tokens(self, now_s: float) -> None:
        if self.running:
            token_s = self._token_s()
            self._v += (now_s - self._v_s) / token_s if token_s > 0.0 else 1e9
        self._v_s = now_s

    def _end_answers(self, now_s: float) -> bool:
        """End the answers that are complete; return whether there are any."""
        decoding = self.decoding
        if not decoding:
            return False
        token_s = self._token_s()
        # A moment that cannot be told from now is now, or the clock would stand still.
        now_v = self._v + CLOSE + (CLOSE_S / token_s if token_s else 0.0)
        before = self.unfinished
        while decoding and decoding[0][0] <= now_v:
            job = heapq.heappop(decoding)[2]
            self.running -= 1
            self._end(job, now_s)
        return self.unfinished < before

    def _end(self, job: ReplayJob, now_s: float) -> None:
        pool, size = self.pool, self.block_tokens
        self.unfinished -= 1
        segment, blocks = job.grown
        last = job.path[-1] if job.path else None
        if blocks:
            most = min(blocks, pool.held.get(segment, 0) + job.private_blocks)
            job.private_blocks -= pool.grow(segment, most, last, now_s)
        filled = (job.prompt_tokens + job.output_tokens - 1) // size - job.prompt_tokens // size
        rest = min(max(filled - blocks, 0), job.private_blocks)
        pool.keep(rest, last, now_s)
        job.private_blocks -= rest
        pool.release(job.path)
        pool.give(job.private_blocks)
        self._ended(self, job, now_s)

    def _wake_at(self, moment_s: float) -> None:
        if self.due_s < 0.0 or moment_s < self.due_s:
            self.due_s = moment_s
            self._wake(self, moment_s)

    def _wake_next(self, now_s: float) -> None:
        step = self._step
        due_s = step.begun_s + step.times * step.step_s if step is not None else -1.0
        if self.decoding:
            ends_s = now_s + max(self.decoding[0][0] - self._v, 0.0) * self._token_s()
            due_s = ends_s if due_s < 0.0 else min(due_s, ends_s)
        if self._pulling:
            due_s = self._pulling[0][0] if due_s < 0.0 else min(due_s, self._pulling[0][0])
        if due_s >= 0.0:
            self._wake_at(max(due_s, now_s))

    # Prefill.

    def _begin_step(self, now_s: float) -> None:
        rates, running = self.rates, self.running
        beside_s = rates.decode_s(running)
        rate = rates.prefill_tokens_per_s
        budget = min(rates.step_tokens - running, max(LEAST_STEP_TOKENS, int(rate * PREFILL_S)))
        if beside_s:
            budget = int(min(budget, max(QUANTUM_TOKENS, rate * (rates.max_itl_s - beside_s))))
        shares, everyone = self._shares(max(budget, 1), now_s)
        if not shares:
            return
        tokens = sum(shares.values())
        load_s = 0.0
        for job in shares:
            load_s += job.load_s
            job.load_s = 0.0
        times = 1
        if everyone and not load_s:
            times = max(1, min(job.left_tokens // share for job, share in shares.items()))
        self._step = _Step(now_s, tokens / rate + beside_s + load_s, times, list(shares.items()), tokens)

    def _shares(self, budget: int, now_s: float) -> tuple[dict[ReplayJob, int], bool]:
        """Hand out a step's tokens: in equal parts to the tenants that wait, least served first, what is left again.

        A rest that is no token for each stays. The second answer: whether all that could be served got as many tokens,
        so that the next step would be the same.
        """
        lines: dict[int, list[ReplayJob]] = {tenant: [] for tenant in self._waiting}
        for job in self._started:
            lines.setdefault(job.tenant, []).append(job)
        for begun in lines.values():
            if len(begun) > 1:
                begun.sort(key=lambda job: job.rank)
        shares: dict[ReplayJob, int] = {}
        if len(lines) == 1:
            ((tenant, begun),) = lines.items()
            self._serve(tenant, begun, budget, shares, now_s)
            return shares, True
        tenants = sorted(lines, key=lambda tenant: self._served.get(tenant, 0.0))
        everyone, first = True, True
        got = dict.fromkeys(tenants, 0)
        while tenants and (first or budget >= len(tenants)):
            part = max(1, budget // min(len(tenants), max(1, budget // QUANTUM_TOKENS)))
            more: list[int] = []
            for tenant in tenants:
                room = min(part, budget)
                if not room:
                    everyone = everyone and not first
                    break
                spent = self._serve(tenant, lines[tenant], room, shares, now_s)
                budget -= spent
                got[tenant] += spent
                if spent == room:
                    more.append(tenant)
            tenants, first = more, False
        return shares, everyone and len({spent for spent in got.values() if spent}) <= 1

    def _serve(self, tenant: int, begun: list[ReplayJob], room: int, shares: dict[ReplayJob, int], now_s: float) -> int:
        """Give a tenant's jobs up to ``room`` tokens; return how many."""
        spent = 0
        while spent < room and (chosen := self._next(tenant, begun, now_s)) is not None:
            before = shares.get(chosen, 0)
            share = min(room - spent, chosen.left_tokens - before)
            shares[chosen] = before + share
            spent += share
            if before + share < chosen.left_tokens:
                begun.insert(0, chosen)
        return spent

    def _next(self, tenant: int, begun: list[ReplayJob], now_s: float) -> ReplayJob | None:
        """Return the tenant's next job, started now if it has not yet, or None."""
        line = self._waiting.get(tenant)
        skipped: list[tuple[float, int, ReplayJob]] = []
        found: ReplayJob | None = None
        while line and found is None:
            if begun and begun[0].rank <= line[0][0]:
                break
            entry = heapq.heappop(line)
            job = entry[2]
            if self._awaits_another(job):
                skipped.append(entry)
            elif self._start(job, now_s):
                found = job
            else:
                skipped.append(entry)
                break
        if line is not None:
            for entry in skipped:
                heapq.heappush(line, entry)
            if not line:
                del self._waiting[tenant]
        return found or (begun.pop(0) if begun else None)

    def _awaits_another(self, job: ReplayJob) -> bool:
        if not self.computing:
            return False
        count, blocks = self.pool.match(job.path)
        if blocks >= job.limit_blocks or count >= len(job.path):
            return False
        return self.computing.get(job.path[count], job.number) != job.number

    def _start(self, job: ReplayJob, now_s: float) -> bool:
        """Give a job its blocks, if there are enough, and count what of its prompt is cached now."""
        pool, size = self.pool, self.block_tokens
        if self.running + len(self._started) >= self.rates.max_num_seqs:
            return False
        count, blocks = pool.match(job.path)
        held = min(blocks, job.limit_blocks)
        needed = max(-(-(job.prompt_tokens + job.output_tokens) // size) - held, 0)
        if not pool.fits(job.path, count, needed):
            return False
        pool.acquire(job.path, count)
        if held:
            pool.hit(job.path[count - 1], now_s)
        pool.take(needed)
        more, token_s = pool.loadable(job.path, count, blocks)
        more = min(more, job.limit_blocks - held)
        if token_s >= 1.0 / self.rates.prefill_tokens_per_s:
            more = 0
        reused = held + more
        reused = max(reused, min(job.pulled_blocks, job.limit_blocks))
        job.load_s += more * size * token_s
        job.private_blocks, job.count = needed, count
        left = max(job.prompt_tokens - reused * size, 1)
        self.queued_tokens += left - job.left_tokens
        job.left_tokens, job.cached_tokens = left, reused * size
        self._rank(job)
        for segment in job.path[count:]:
            self.computing.setdefault(segment, job.number)
        self._started.append(job)
        return True

    def _end_step(self, step: _Step, now_s: float) -> None:
        for job in self._advance(step, step.times):
            self._started.remove(job)
            used, own = self.pool.publish(job.path, job.count, now_s)
            kept = -(-(job.prompt_tokens + job.output_tokens) // self.block_tokens) - own
            self.pool.give(job.private_blocks - used - kept)  # copies of what another one has published meanwhile
            job.private_blocks = kept
            for segment in job.path[job.count :]:
                if self.computing.get(segment) == job.number:
                    del self.computing[segment]
            self._first_token(self, job, now_s)
            if job.output_tokens <= 1:
                self._end(job, now_s)
            else:
                self.running += 1
                heapq.heappush(self.decoding, (self._v + job.output_tokens - 1, job.number, job))
