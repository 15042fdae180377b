"""Prompt tokens and starting requests of a step of vLLM while tenants compete.

Uncached prompt tokens go by turns (``FairQueue``), within a tenant in the order of its queue. A tenant with more than
the mean recent use gets 512 a step, and beside others' requests a part of the time of their answers (``Pace``). Slots
and blocks go by the rule of ``fairness.verdict``. Requests that yield (``flex``) prefill with what others leave, and
give up their places to them. Reads vLLM's requests and changes none.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from serve_app.engine.protocol import Clock
from serve_app.engine.scheduling.fair_queue import LEAST_STEP_TOKENS, FairQueue
from serve_app.engine.scheduling.running_set import RESERVED_TOKENS
from serve_app.engine.vllm.scheduling.tenant import expected_tokens_of, tenant_of, yields
from serve_app.fairness.front_door import ALONE_AFTER_S
from serve_app.fairness.shares import Budget, Shares, Verdict, verdict

BESIDE_TOKENS = 64
"""Prompt tokens that yield in a step with others: so few that they hardly make it longer, as it reads all weights."""

SOON_S = 0.2
"""So long after a tenant's answer a flood still leaves room for its next request: many clients ask again at once."""


@dataclass(frozen=True, slots=True)
class Need:
    """Needs of a waiting request: ``tokens`` to compute, and ``blocks`` out of the free ones."""

    tokens: int
    blocks: int


class Pool(Protocol):
    """The pool, asked only about the requests that may start next."""

    def need_of(self, request: Any) -> Need:
        """Return the tokens and blocks that a waiting request would need if it started now."""

    def protected(self, tenant: str) -> int:
        """Return the blocks that a tenant over its share must leave: cached ones of tenants within theirs."""


@dataclass(slots=True)
class Plan:
    """A step: ``limits``, tokens by id of the requests with competing prompts, and ``starts`` of waiting ones.

    ``preempted``: running requests that yield their places to some of these.
    """

    limits: dict[str, int] = field(default_factory=dict)
    starts: deque[Any] = field(default_factory=deque)
    preempted: list[Any] = field(default_factory=list)


class TenantTurns:
    """Steps of up to ``max_tokens`` for ``places`` requests over a pool of ``blocks``.

    ``blocks_for``: most blocks that a request of so many tokens holds at once.
    """

    def __init__(
        self, max_tokens: int, places: int, blocks: int, blocks_for: Callable[[int], int], clock: Clock = time.monotonic
    ) -> None:
        self.shares = Shares({}, clock)
        self._clock = clock
        self._others_s = -inf
        """When a request that does not yield was last seen."""
        self._served_s: dict[str, float] = {}
        """When a step last had requests of each tenant that do not yield, within ``SOON_S``."""
        self._max_tokens = max_tokens
        self._places = places
        self._blocks = blocks
        self._blocks_for = blocks_for
        self._fair_queue: FairQueue[Any] = FairQueue(max_tokens)
        self._yielding_queue: FairQueue[Any] = FairQueue(max_tokens)

    def came(self, request: Any, tenants: Iterable[str]) -> None:
        """Note a request's arrival, and the ``tenants`` that compete then."""
        for tenant in tenants:
            self.shares.touch(tenant)
        if not yields(request):
            self._others_s = self._clock()

    def blocks_of(self, request: Any) -> int:
        """Return the blocks that a request needs in all: those of its tokens and of the answer's next ones."""
        answered = request.num_tokens - request.num_prompt_tokens
        more = max(RESERVED_TOKENS, expected_tokens_of(request) - answered)
        tokens = min(request.num_prompt_tokens + request.max_tokens, request.num_tokens + more)
        return self._blocks_for(tokens)

    def plan(
        self,
        running: Collection[Any],
        waiting: Iterable[Any],
        in_use: Mapping[str, int],
        pool: Pool,
        gentle_tokens: int = LEAST_STEP_TOKENS,
    ) -> Plan:
        """Return the next step's plan. ``waiting``: in their order; ``in_use``: blocks by tenant.

        ``gentle_tokens``: those of a flood in a step beside others' requests.

        Requests with a priority below 0 are copies of KV, which go first without limits.
        """
        runs = set(map(tenant_of, running))
        step = _Step(Budget(self.shares, lambda: self._places), Budget(self.shares, lambda: self._blocks), pool)
        for tenant, blocks in in_use.items():
            step.blocks.take(tenant if tenant in runs else "", blocks)  # with pins alone it may start all that fits
        for request in running:
            if request.priority >= 0:
                used = self._blocks_for(request.num_computed_tokens)
                step.runs(request, used, max(0, self.blocks_of(request) - used))
        for request in waiting:
            step.waits(request)
        for tenant in step.lines.keys() | step.yielding.keys() | step.decodes.keys():
            self.shares.touch(tenant)
        if beside := bool(step.lines or step.answering):
            self._others_s = self._clock()
        self._serve(step, runs, gentle_tokens, places=len(running) < self._places)
        if step.yielding:
            self._serve_yielding(step, gentle_tokens, beside=beside)
        return step.plan

    def _serve(self, step: "_Step", runs: Collection[str], gentle_tokens: int, *, places: bool) -> None:
        """Plan the prompts that do not yield, by turns. ``runs``: tenants with requests; ``places``: some are free."""
        queue = self._fair_queue
        queue.begin(step.lines, step.decodes)
        heavy = set(filter(queue.is_heavy, step.lines))
        starts = places or bool(step.able)
        light = {tenant for tenant in step.lines if tenant not in heavy and (starts or tenant in runs)}
        now_s = self._clock()
        recent = {tenant: at_s for tenant, at_s in self._served_s.items() if now_s - at_s < SOON_S}
        self._served_s = recent | dict.fromkeys(step.answering | light, now_s)
        # What others ask meanwhile waits for this step, for the one that vLLM schedules during it, and for its own.
        most = {tenant: gentle_tokens if self._served_s.keys() - {tenant} else LEAST_STEP_TOKENS for tenant in heavy}
        queue.hand_out(self._max_tokens - step.decodes.total(), step.serve, most)
        step.denied |= sum(not request.priority < 0 for request in step.plan.starts) < step.unstarted

    def _serve_yielding(self, step: "_Step", gentle_tokens: int, *, beside: bool) -> None:
        """Plan the prompts that yield with what the others left. ``beside``: of some that run or wait."""
        left = self._max_tokens - step.decodes.total() - sum(step.plan.limits.values())
        if beside:
            left = min(left, BESIDE_TOKENS, gentle_tokens)
        elif self._clock() - self._others_s < ALONE_AFTER_S:
            left = min(left, LEAST_STEP_TOKENS)  # who comes waits for the end of this step, and of the next one
        for one in step.plan.preempted:
            if one.is_prefill_chunk:
                step.yielding[tenant_of(one)].remove(one)
                del step.plan.limits[one.request_id]
        self._yielding_queue.begin({tenant: line for tenant, line in step.yielding.items() if line}, step.decodes)
        self._yielding_queue.hand_out(left, step.serve)


@dataclass(slots=True)
class _Step:
    """A plan in the making. ``left``: unplanned tokens of each prompt; ``closed``: no more requests start.

    ``denied``: none that yields starts. ``able``: those that run, with their blocks, the last started last.
    ``lines``: prompts by tenant, running ones first; ``yielding``: those that yield; ``unstarted``: waiting ones that
    do not. ``decodes``: tokens of answers; ``answering``: tenants with one that does not yield.
    """

    places: Budget
    blocks: Budget
    pool: Pool
    plan: Plan = field(default_factory=Plan)
    left: dict[str, int] = field(default_factory=dict)
    closed: bool = False
    denied: bool = False
    able: list[tuple[Any, int]] = field(default_factory=list)
    lines: dict[str, deque[Any]] = field(default_factory=dict)
    yielding: dict[str, deque[Any]] = field(default_factory=dict)
    decodes: Counter[str] = field(default_factory=Counter)
    answering: set[str] = field(default_factory=set)
    unstarted: int = 0

    def runs(self, request: Any, used: int, reserved: int) -> None:
        """Count a running request, which has ``used`` blocks and may take ``reserved`` more."""
        tenant = tenant_of(request)
        self.places.take(tenant, 1)
        self.blocks.take(tenant, reserved)
        if yields(request):
            self.able.append((request, used + reserved))
        if request.is_prefill_chunk:
            self.plan.limits[request.request_id] = 0
            self.left[request.request_id] = request.num_tokens - request.num_computed_tokens
            self._line_up(tenant, request)
        else:
            self.decodes[tenant] += 1 + len(request.spec_token_ids)
            if not yields(request):
                self.answering.add(tenant)

    def waits(self, request: Any) -> None:
        """Count a waiting request."""
        if request.priority < 0:
            self.plan.starts.append(request)
        else:
            self._line_up(tenant_of(request), request)
            self.unstarted += not yields(request)

    def _line_up(self, tenant: str, request: Any) -> None:
        (self.yielding if yields(request) else self.lines).setdefault(tenant, deque()).append(request)

    def serve(self, tenant: str, line: deque[Any], most: int) -> int:
        """Plan up to ``most`` tokens of a tenant's queue; return the number. Unfinished requests stay in it."""
        spent = 0
        while line and spent < most:
            request = line[0]
            name = request.request_id
            if name not in self.left and not self._start(tenant, request):
                line.clear()
                break
            tokens = min(self.left[name], most - spent)
            self.plan.limits[name] += tokens
            self.left[name] -= tokens
            spent += tokens
            if not self.left[name]:
                line.popleft()
        return spent

    def _start(self, tenant: str, request: Any) -> bool:
        """Let a request start if slots and blocks allow it. One within its share that waits is not overtaken."""
        if self.closed or (self.denied and yields(request)):
            return False
        need = self.pool.need_of(request)
        answer = self._verdict(tenant, need)
        if answer != "granted" and not yields(request):
            answer = self._make_way(tenant, need, answer)
            self.denied |= answer != "granted"
        if answer != "granted":
            self.closed = answer == "no_room"
            return False
        self.places.take(tenant, 1)
        self.blocks.take(tenant, need.blocks)
        self.plan.limits[request.request_id] = 0
        self.left[request.request_id] = need.tokens
        self.plan.starts.append(request)
        return True

    def _verdict(self, tenant: str, need: Need) -> Verdict:
        blocks = self.blocks.claim(tenant, need.blocks, kept=self.pool.protected(tenant))
        return verdict(self.places.claim(tenant, 1), blocks)

    def _make_way(self, tenant: str, need: Need, answer: Verdict) -> Verdict:
        """Preempt requests that yield, the last started first, if another one can start then."""
        freed: list[tuple[Any, int, int]] = []
        while self.able and answer != "granted":
            one, blocks = self.able.pop()
            owner = tenant_of(one)
            given = min(blocks, self.blocks.held(owner))  # it may share some
            self.places.give_back(owner, 1)
            self.blocks.give_back(owner, given)
            freed.append((one, blocks, given))
            answer = self._verdict(tenant, need)
        if answer == "granted":
            self.plan.preempted += [one for one, *_ in freed]
            return answer
        for one, blocks, given in reversed(freed):
            self.places.take(tenant_of(one), 1)
            self.blocks.take(tenant_of(one), given)
            self.able.append((one, blocks))
        return answer
