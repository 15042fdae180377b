"""The target number of replicas: one pure function, used by Serve's controller.

It uses neither Ray nor a clock. Formula and failures: docs/how-to/autoscaling.md.
"""

from dataclasses import dataclass, replace
from math import ceil, inf, sqrt
from typing import Literal

from router.protocol.autoscaling import Bounds
from serve_app.autoscaling.signals import Signals

CONTROL_PERIOD_S = 5.0

FAST_S, SLOW_S = 30.0, 300.0
ENOUGH_REQUESTS, ENOUGH_A_REPLICA = 200, 20
"""Work is averaged over the time of this many requests, within these two times. A few large requests predict little,
and with more replicas one replica is a smaller part of the work.
"""

DRAIN_S = 60.0
"""The time to work off a backlog beyond the wait that the target allows."""

LEAST_BETA, FIRST_BETA, MOST_BETA = 0.0, 1.0, 2.5
BETA_UP_A_S, BETA_DOWN_A_S = 0.004, 0.0004
"""Spare replicas are ``beta`` times the square root of the work. Beta slowly follows the p90 of TTFT."""

OWN_WEIGHT = 1.1
"""More replicas cannot lower a p90 within a tenth of the requests' own prefill."""

SLOTS_FILLED = POOL_FILLED = 0.85
SET_FILLED = 0.9
SHRINK_MARGIN = 1.1
RISEN = 1.05
"""Just-stopped replicas start again only if work exceeds that at the stop by this factor, or for a backlog."""
GROW_SLACK = 0.1

START_PATIENCE_S = 300.0
"""Replicas that need longer to start may never start, so no more are requested meanwhile."""

_LEAST_REQUESTS = 10
REQUESTS_S = 60.0

ScalingReason = Literal[
    "hold", "steady", "bounds", "work", "backlog", "ttft", "decode_slots", "kv_pool", "load_fell", "floor", "starting"
]
"""Stable words for logs, notices and metrics. ``floor``: the load needs fewer replicas than the caches."""

Point = tuple[float, float]
"""A time in seconds, and the value at that time."""


@dataclass(frozen=True, slots=True)
class State:
    """The policy's memory, bounded by ``downscale_delay_s``.

    ``since_s``: the time since which ``needs`` has no gap; ``arrived_tokens``: as last reported, by replica; ``work``:
    the total work arrived so far, in seconds of prefill; ``needs``: time, need and work, with falling needs, so that
    the first is the maximum; ``wants``: rising, for the time in which more than the target were wanted. ``grown_s``,
    ``shrunk_s``: the last decisions; ``shrunk_work``: the maximum work within the delay before ``shrunk_s``.
    """

    since_s: float
    decided_s: float
    beta: float = FIRST_BETA
    arrived_tokens: tuple[tuple[str, float], ...] = ()
    work: tuple[Point, ...] = ()
    needs: tuple[tuple[float, float, float], ...] = ()
    wants: tuple[Point, ...] = ()
    wanted_since_s: float = inf
    grown_s: float = -inf
    shrunk_s: float = -inf
    shrunk_work: float = 0.0


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """``target``: replicas; ``needed``: before delays, bounds and rounding; ``why``: an explanation for people."""

    target: int
    needed: float
    reason: ScalingReason
    why: str


def decide(state: State | None, now: Signals, now_s: float) -> tuple[ScalingDecision, State]:
    """Return the decision, and the state for the next one. ``state``: None the first time."""
    if now.fault or now.bounds is None:
        state = state or State(now_s, now_s)
        state = replace(state, since_s=now_s, decided_s=now_s, wants=(), wanted_since_s=inf)
        return ScalingDecision(now.target, 0.0, "hold", now.fault), state
    bounds = now.bounds
    if not now.target:
        return _from_zero(now, bounds), State(now_s, now_s)
    state = _taken_in(state or State(now_s, now_s), now, bounds, now_s)
    work = _work(state, now, bounds, now_s)
    needed, cause, why = _needed(state, now, bounds, work)
    risen = cause == "backlog" or work > RISEN * state.shrunk_work
    state = _remember(state, needed, work, now, bounds, now_s, may_grow=risen or _past(state.shrunk_s, bounds, now_s))
    decision = _decision(state, now, bounds, needed, cause, why, now_s)
    if decision.target > now.target:
        state = replace(state, wants=(), wanted_since_s=inf, grown_s=now_s)
    elif decision.target < now.target:
        state = replace(
            state, wants=(), wanted_since_s=inf, shrunk_s=now_s, shrunk_work=max(point[2] for point in state.needs)
        )
    return decision, state


def _from_zero(now: Signals, bounds: Bounds) -> ScalingDecision:
    """Return the decision without any replica: the first one starts for the first request, without delay."""
    least = int(bounds.min_replicas)
    if now.waiting or least:
        return ScalingDecision(max(1, least), 1.0, "work", f"{now.waiting:.0f} requests wait for a first replica")
    return ScalingDecision(0, 0.0, "steady", "no request waits")


def _decision(
    state: State, now: Signals, bounds: Bounds, needed: float, cause: ScalingReason, why: str, now_s: float
) -> ScalingDecision:
    target = now.target
    least, most = int(bounds.min_replicas), int(bounds.max_replicas)
    if not least <= target <= most:
        bounded = min(max(target, least), most)
        return ScalingDecision(bounded, needed, "bounds", f"between {least} and {most} replicas are allowed")
    if now_s - state.wanted_since_s >= bounds.upscale_delay_s and target < most:
        if now.running < target and now_s - state.grown_s >= START_PATIENCE_S:
            return ScalingDecision(target, needed, "starting", f"{target - now.running} replicas do not start; {why}")
        # A deploy may have raised the target meanwhile.
        return ScalingDecision(max(target, min(int(state.wants[0][1]), most)), needed, cause, why)
    highest = state.needs[0][1]
    enough = ceil(SHRINK_MARGIN * highest)
    if enough < target and _past(max(state.since_s, state.grown_s), bounds, now_s):
        floor, purpose = _floor(now) if highest or least else (0, "")  # without any work, the last replica stops
        number = min(max(enough, floor, least), target)
        if number < target:
            said = f"at most {highest:.2f} were needed for {bounds.downscale_delay_s:g} s"
            return ScalingDecision(
                number, needed, "load_fell", said if floor <= enough else f"{said}; {floor} for {purpose}"
            )
        if floor > max(enough, least):
            return ScalingDecision(target, needed, "floor", f"{enough} are enough, but {floor} are kept for {purpose}")
    return ScalingDecision(target, needed, "steady", why)


def _taken_in(state: State, now: Signals, bounds: Bounds, now_s: float) -> State:
    """Add the work that arrived since the last call, and adapt beta to the TTFT."""
    before = dict(state.arrived_tokens)
    came_tokens = sum(max(tokens - before.get(name, tokens), 0.0) for name, tokens in now.arrived_tokens)
    total_s = came_tokens * now.token_s + (state.work[-1][1] if state.work else 0.0)
    work = [point for point in state.work if point[0] < now_s]
    while len(work) > 1 and work[1][0] <= now_s - _slow_s(bounds):
        del work[0]
    elapsed_s = now_s - state.decided_s
    beta = state.beta
    if now.running >= now.target and now.requests >= _LEAST_REQUESTS:
        goal_s = max(bounds.target_ttft_s, OWN_WEIGHT * now.p90_own_s)
        if now.p90_ttft_s > goal_s:
            beta = min(beta + BETA_UP_A_S * elapsed_s, MOST_BETA)
        elif now.p90_ttft_s < 0.85 * goal_s:
            beta = max(beta - BETA_DOWN_A_S * elapsed_s, LEAST_BETA)
    return replace(state, decided_s=now_s, beta=beta, arrived_tokens=now.arrived_tokens, work=(*work, (now_s, total_s)))


def _work(state: State, now: Signals, bounds: Bounds, now_s: float) -> float:
    """Return the number of replicas that the arriving work keeps busy."""
    enough = ENOUGH_REQUESTS + ENOUGH_A_REPLICA * now.target
    window_s = min(max(FAST_S, REQUESTS_S * enough / max(now.requests, 1.0)), _slow_s(bounds))
    return _rate(state.work, now_s, window_s)


def _needed(state: State, now: Signals, bounds: Bounds, work: float) -> tuple[float, ScalingReason, str]:
    """Return the number of replicas that the current load needs, and the reason."""
    spare = state.beta * sqrt(work)
    behind = work + max(now.backlog_s - now.target * bounds.target_ttft_s, 0.0) / DRAIN_S
    slots = now.decoding / now.slots / SLOTS_FILLED if now.slots else 0.0
    pool = now.used_tokens / now.pool_tokens / POOL_FILLED if now.pool_tokens else 0.0
    needs: dict[ScalingReason, float] = {
        "work": work + spare,
        "backlog": behind,
        "decode_slots": slots,
        "kv_pool": pool,
    }
    cause = max(needs, key=lambda one: needs[one])
    needed = needs[cause]
    if cause == "work" and state.beta > FIRST_BETA and ceil(work + FIRST_BETA * sqrt(work)) < ceil(needed):
        cause = "ttft"
    why = (
        f"work {work:.2f} + {spare:.2f} spare, backlog {now.backlog_s:.1f} s, TTFT p90 {now.p90_ttft_s:.2f} s "
        f"(own prefill {now.p90_own_s:.2f} s, target {bounds.target_ttft_s:g} s), decode slots {slots:.2f}, "
        f"KV pool {pool:.2f}: {needed:.2f} replicas"
    )
    return needed, cause, why


def _remember(
    state: State, needed: float, work: float, now: Signals, bounds: Bounds, now_s: float, *, may_grow: bool
) -> State:
    """Record the current need, for the maximum within the delay and the minimum since more were wanted."""
    # A need averages work of up to ``SLOW_S`` before it. Both times together must not exceed the delay.
    kept_s = now_s - (bounds.downscale_delay_s - _slow_s(bounds))
    needs = tuple(point for point in state.needs if kept_s <= point[0] < now_s and point[1] > needed)
    state = replace(state, needs=(*needs, (now_s, needed, work)))
    want = ceil(needed - GROW_SLACK)
    if want <= now.target or not may_grow:
        return replace(state, wants=(), wanted_since_s=inf)
    since_s = min(state.wanted_since_s, now_s)
    wants = tuple(p for p in state.wants if now_s - bounds.upscale_delay_s <= p[0] < now_s and p[1] < want)
    return replace(state, wants=(*wants, (now_s, want)), wanted_since_s=since_s)


def _floor(now: Signals) -> tuple[int, str]:
    """Return the number of replicas that the caches need, and the purpose."""
    floors = {"the working set": 0.0, "explicit saves": 0.0}
    if now.pool_tokens:
        floors["the working set"] = now.working_set_tokens / (SET_FILLED * now.pool_tokens)
    if now.pinned_tokens and not now.hands_over:
        floors["explicit saves"] = float(now.target)  # any leaving replica may hold them
    elif now.pin_budget_tokens:
        floors["explicit saves"] = now.pinned_tokens / now.pin_budget_tokens
    purpose = max(floors, key=lambda one: floors[one])
    return ceil(floors[purpose]), purpose


def _past(decided_s: float, bounds: Bounds, now_s: float) -> bool:
    return now_s - decided_s >= bounds.downscale_delay_s


def _slow_s(bounds: Bounds) -> float:
    return min(SLOW_S, bounds.downscale_delay_s / 2)


def _rate(work: tuple[Point, ...], now_s: float, window_s: float) -> float:
    """Return the work that arrived per second, over the window or its known part."""
    first = work[0]
    for point in work:
        if point[0] > now_s - window_s:
            break
        first = point
    return (work[-1][1] - first[1]) / max(now_s - first[0], min(window_s, FAST_S))
