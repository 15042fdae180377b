"""The shared state of one application's autoscaling policies, in Serve's controller, with freshness and notices.

Serve pickles a policy's module by value. This module is imported by reference, so its state survives a deploy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

from ray.serve.config import AutoscalingContext

from router.protocol.autoscaling import SEATS, IngressFigures, ReplicaFigures
from serve_app.autoscaling.policy import CONTROL_PERIOD_S, ScalingDecision, State, decide
from serve_app.autoscaling.signals import signals
from serve_app.notices import board_name, figures_prefix, post

logger = logging.getLogger("ray.serve")

FROM_ZERO_S = 0.25
"""The period of decisions without any replica: a request waits for the next one."""

Raw = Mapping[str, Mapping[str, tuple[float, float]]]
"""By replica id and figure name: the time of the newest value, by its machine's clock, and the value."""

F = TypeVar("F", ReplicaFigures, IngressFigures)


class _Newest:
    """The time of each source's last change, by this process's clock, because other clocks may be wrong."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}

    def aged(self, raw: Raw, kind: type[F], now_s: float) -> dict[str, tuple[float, F]]:
        """Return the age and the figures by source, without invalid figures."""
        seen: dict[str, tuple[float, float]] = {}
        aged: dict[str, tuple[float, F]] = {}
        for source, figures in raw.items():
            at_s = max(at_s for at_s, _ in figures.values())
            before = self._seen.get(source)
            seen[source] = before if before is not None and before[0] == at_s else (at_s, now_s)
            with suppress(ValueError):
                aged[source] = now_s - seen[source][1], kind.of({name: value for name, (_, value) in figures.items()})
        self._seen = seen
        return aged


class Board:
    """The board of one application, or of one of its models. The controller's only thread calls it often.

    ``name``: that of its notices. ``ingresses``: the application's board; ``prefix``: of this model's figures there.
    """

    def __init__(self, name: str, ingresses: Board | None = None, prefix: str = "") -> None:
        self._name = name
        self._at_ingresses = ingresses or self
        self._prefix = prefix
        self._replicas, self._ingresses = _Newest(), _Newest()
        self._ingress_raw: Raw = {}
        self._state: State | None = None
        self._next_s = 0.0
        self._next_fault_s = 0.0
        self._last = ""

    def safely(self, ctx: AutoscalingContext, ask: Callable[[AutoscalingContext], int]) -> int:
        """Return the result of ``ask``, or on an error the current target. An exception would stop the controller."""
        try:
            return ask(ctx)
        except Exception:
            now_s = time.monotonic()
            if now_s >= self._next_fault_s:
                self._next_fault_s = now_s + 60.0
                logger.exception("autoscaling failed; the number of replicas stays")
            return int(ctx.target_num_replicas)

    def hear_ingresses(self, ctx: AutoscalingContext) -> int:
        """Store the ingresses' figures, and return their unchanged number."""
        self._ingress_raw = _newest(ctx)
        return int(ctx.target_num_replicas)

    def seats(self, ctx: AutoscalingContext) -> int:
        """Return the number of replicas that the listed workers need, never less than now."""
        numbers = [
            int(value) for figures in _newest(ctx).values() for name, (_, value) in figures.items() if name == SEATS
        ]
        return max(int(ctx.target_num_replicas), *numbers, 1)

    def target(self, ctx: AutoscalingContext) -> int:
        """Return the target number of replicas. Between two control periods it does not change."""
        now_s, current = time.monotonic(), int(ctx.target_num_replicas)
        if now_s < self._next_s:
            return current
        self._next_s = now_s + (CONTROL_PERIOD_S if current else FROM_ZERO_S)
        replicas = self._replicas.aged(_newest(ctx), ReplicaFigures, now_s)
        ingresses = self._ingresses.aged(self._of_ingresses(), IngressFigures, now_s)
        running = [replica.unique_id for replica in ctx.running_replicas]
        decision, self._state = decide(
            self._state, signals(current, running, replicas, list(ingresses.values())), now_s
        )
        self._tell(current, decision)
        return decision.target

    def _of_ingresses(self) -> Raw:
        """Return the ingresses' figures about this board's model."""
        prefix = self._prefix
        values = {
            source: {name.removeprefix(prefix): value for name, value in figures.items() if name.startswith(prefix)}
            for source, figures in self._at_ingresses._ingress_raw.items()
        }
        return {source: figures for source, figures in values.items() if figures}

    def _tell(self, current: int, decision: ScalingDecision) -> None:
        news = decision.reason if decision.reason in ("hold", "starting", "floor") else ""
        if decision.target == current and news == self._last:
            return
        self._last = news
        if decision.target == current and not news:
            return
        change = f"{current} -> {decision.target} replicas" if decision.target != current else f"{current} replicas"
        logger.info("autoscaling of %s: %s (%s): %s", self._name, change, decision.reason, decision.why)
        # A thread calls Ray's store, because the controller's only thread must not block.
        notice: dict[str, Any] = {"from": current, **asdict(decision)}
        name = f"{decision.reason} {self._next_s:.0f}"
        threading.Thread(target=_post, args=(self._name, name, notice), daemon=True).start()


def _post(board: str, name: str, notice: dict[str, Any]) -> None:
    try:
        post(board, "autoscaling", name, notice)
    except Exception:
        logger.exception("a notice of autoscaling could not be posted")


def _newest(ctx: AutoscalingContext) -> Raw:
    raw: dict[str, dict[str, tuple[float, float]]] = {}
    for name, values in (ctx.raw_metrics or {}).items():
        for replica, series in values.items():
            if series:
                raw.setdefault(replica.unique_id, {})[name] = (series[-1].timestamp, series[-1].value)
    return raw


_boards: dict[str, Board] = {}


def board_of(app_name: str, deployment: str = "") -> Board:
    """Return the board of an application, or of one of its models' deployments, created on first use."""
    name, prefix = board_name(app_name, deployment), figures_prefix(deployment)
    if name not in _boards:
        _boards[name] = Board(name, board_of(app_name) if prefix else None, prefix)
    return _boards[name]
