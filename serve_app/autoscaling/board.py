"""Where the policies of one application's deployments meet, in the controller: state, freshness, what is told of it.

Serve pickles a policy's own module by value and makes the policy anew at a deploy; this module is imported by
reference, so there is one of it in the controller, and what it holds outlives a deploy, though not the controller.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

from ray.util.metrics import Counter, Gauge

from router.protocol.autoscaling import IngressFigures, ReplicaFigures
from serve_app.autoscaling.policy import CONTROL_PERIOD_S, Decision, State, decide
from serve_app.autoscaling.signals import signals
from serve_app.notices import post

logger = logging.getLogger("ray.serve")

Raw = Mapping[str, Mapping[str, tuple[float, float]]]
"""By figure and replica's id: when the newest value was taken, by the clock of its machine, and the value."""

F = TypeVar("F", ReplicaFigures, IngressFigures)


class _Newest:
    """When each source's figures last changed, by this process's clock: other machines' may be wrong."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}

    def aged(self, raw: Raw, kind: type[F], now_s: float) -> dict[str, tuple[float, F]]:
        """Return by source how old its figures are, and the figures; without those that make no sense."""
        seen: dict[str, tuple[float, float]] = {}
        aged: dict[str, tuple[float, F]] = {}
        for source in {source for values in raw.values() for source in values}:
            figures = {name: values[source] for name, values in raw.items() if source in values}
            at_s = max(at_s for at_s, _ in figures.values())
            before = self._seen.get(source)
            seen[source] = before if before is not None and before[0] == at_s else (at_s, now_s)
            with suppress(ValueError):
                aged[source] = now_s - seen[source][1], kind.of({name: value for name, (_, value) in figures.items()})
        self._seen = seen
        return aged


class Board:
    """One application. The controller's only thread calls it, often."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self._replicas, self._ingresses = _Newest(), _Newest()
        self._ingress_raw: Raw = {}
        self._state: State | None = None
        self._next_s = 0.0
        self._last = ""
        self._targets = Gauge("warmpath_autoscaling_target_replicas", "What was decided.", tag_keys=("app",))
        self._needed = Gauge(
            "warmpath_autoscaling_needed_replicas", "Before delays, bounds and rounding.", tag_keys=("app",)
        )
        self._decisions = Counter(
            "warmpath_autoscaling_decisions_total", "Changes, and holds by cause.", tag_keys=("app", "reason")
        )

    def hear_ingresses(self, raw: Raw) -> None:
        """Take what the ingresses report."""
        self._ingress_raw = raw

    def target(self, current: int, running: Sequence[str], raw: Raw, now_s: float) -> int:
        """Return how many replicas there should be; between two control periods, ``current``.

        ``running``: ids of the replicas that run; ``raw``: what replicas report; ``now_s``: of a clock that only rises.
        """
        if now_s < self._next_s:
            return current
        self._next_s = now_s + CONTROL_PERIOD_S
        replicas = self._replicas.aged(raw, ReplicaFigures, now_s)
        ingresses = self._ingresses.aged(self._ingress_raw, IngressFigures, now_s)
        seen = signals(current, running, replicas, list(ingresses.values()))
        decision, self._state = decide(self._state, seen, now_s)
        self._tell(current, decision)
        return decision.target

    def _tell(self, current: int, decision: Decision) -> None:
        tags = {"app": self._app_name}
        self._targets.set(decision.target, tags)
        if decision.reason != "hold":
            self._needed.set(decision.needed, tags)
        news = decision.reason if decision.reason in ("hold", "starting", "floor") else ""
        if decision.target == current and news == self._last:
            return
        self._last = news
        if decision.target == current and not news:
            return
        self._decisions.inc(1, {**tags, "reason": decision.reason})
        change = f"{current} -> {decision.target} replicas" if decision.target != current else f"{current} replicas"
        logger.info("autoscaling of %s: %s (%s): %s", self._app_name, change, decision.reason, decision.why)
        # Ray's store is asked in a thread: the controller has one, and everything waits for it.
        notice: dict[str, Any] = {"from": current, **asdict(decision)}
        name = f"{decision.reason} {self._next_s:.0f}"
        threading.Thread(target=_post, args=(self._app_name, name, notice), daemon=True).start()


def _post(app_name: str, name: str, notice: dict[str, Any]) -> None:
    try:
        post(app_name, "autoscaling", name, notice)
    except Exception:
        logger.exception("a notice of autoscaling could not be put up")


_boards: dict[str, Board] = {}


def board_of(app_name: str) -> Board:
    """Return an application's board, made on first use."""
    if app_name not in _boards:
        _boards[app_name] = Board(app_name)
    return _boards[app_name]
