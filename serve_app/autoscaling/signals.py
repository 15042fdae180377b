"""Converts reported figures to the policy's input: one set of numbers for the whole deployment.

Figures must be complete, fresh and of one version. Ingresses' are merged: each router sees a part of the traffic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.load import seconds_per_token
from router.protocol.autoscaling import Bounds, IngressFigures, ReplicaFigures

OLD_AFTER_S = 10.0
"""Older figures are ignored. If any replica's figures are older, the policy makes no decision."""


@dataclass(frozen=True, slots=True)
class Signals:
    """The deployment at one time. Tokens and seconds are sums over replicas unless stated otherwise.

    ``running``: running replicas; ``target``: wanted replicas. The difference is starting. ``fault``: the reason why no
    decision is possible, or "". ``arrived_tokens``: by replica, all uncached tokens since its start; ``token_s``: a
    replica's time for one token; ``backlog_s``: the time for all waiting tokens. ``decoding``: sequences that run or
    wait; ``slots``: of one replica, 0: no bound. ``pool_tokens``, ``pin_budget_tokens``: of one replica.
    ``hands_over``: whether pinned KV survives its replica. ``waiting``: requests at the ingresses without a place.
    """

    target: int
    running: int
    fault: str
    bounds: Bounds | None = None
    arrived_tokens: tuple[tuple[str, float], ...] = ()
    token_s: float = 0.0
    backlog_s: float = 0.0
    decoding: float = 0.0
    slots: float = 0.0
    used_tokens: float = 0.0
    pool_tokens: float = 0.0
    pinned_tokens: float = 0.0
    pin_budget_tokens: float = 0.0
    hands_over: bool = True
    working_set_tokens: float = 0.0
    requests: float = 0.0
    p90_ttft_s: float = 0.0
    p90_own_s: float = 0.0
    waiting: float = 0.0


def signals(
    target: int,
    running: Sequence[str],
    replicas: Mapping[str, tuple[float, ReplicaFigures]],
    ingresses: Sequence[tuple[float, IngressFigures]],
) -> Signals:
    """Return the signals. ``running``: ids of the running replicas. Figures have their age in seconds."""
    recent = [figures for age_s, figures in ingresses if age_s <= OLD_AFTER_S]
    # While new settings spread, the ingresses may differ for a second. Any ingress's settings will do.
    bounds = recent[0] if recent else None
    reported = {name: replicas[name][1] for name in running if name in replicas and replicas[name][0] <= OLD_AFTER_S}
    fault = ""
    if not running and not target and bounds is not None:
        return Signals(0, 0, "", bounds, waiting=sum(one.waiting_requests for one in recent))
    if not running:
        fault = "no replica runs"
    elif len(reported) < len(running):
        fault = f"{len(running) - len(reported)} of {len(running)} replicas have not reported lately"
    elif not recent:
        fault = "no ingress has reported lately"
    elif len({figures.version for figures in reported.values()}) > 1:
        fault = "replicas of two versions run"
    if fault:
        return Signals(target, len(running), fault, bounds)
    figures = list(reported.values())
    rates = [one.prefill_tokens_per_s for one in figures if one.prefill_tokens_per_s > 0.0]
    decoding = sum(one.running for one in figures)
    token_s = seconds_per_token(sum(rates) / len(rates) if rates else 0.0, decoding / len(figures))
    requests = sum(one.requests for one in recent)

    def mean(values: Sequence[float]) -> float:
        return sum(v * one.requests for v, one in zip(values, recent, strict=True)) / requests if requests else 0.0

    return Signals(
        target=target,
        running=len(figures),
        fault="",
        bounds=bounds,
        arrived_tokens=tuple((name, one.arrived_tokens) for name, one in reported.items()),
        token_s=token_s,
        backlog_s=sum(one.queued_tokens for one in figures) * token_s
        + sum(one.waiting_requests * one.mean_own_s for one in recent),
        decoding=decoding + sum(one.waiting for one in figures),
        slots=min(one.slots for one in figures),
        used_tokens=sum(one.used_tokens for one in figures),
        pool_tokens=min(one.pool_tokens for one in figures),
        pinned_tokens=sum(one.pinned_tokens for one in figures),
        pin_budget_tokens=min(one.pin_budget_tokens for one in figures),
        hands_over=all(one.hands_over for one in figures),
        # Routers that share traffic see the same hot blocks, so the maximum over routers is the common working set.
        working_set_tokens=max(one.working_set_tokens for one in recent),
        requests=requests,
        p90_ttft_s=mean([one.p90_ttft_s for one in recent]),
        p90_own_s=mean([one.p90_own_s for one in recent]),
    )
