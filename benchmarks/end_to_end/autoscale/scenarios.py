"""What happens when: the offered load as a share of its peak, and what is done to the cluster under it.

Lengths are in units of ``--seconds``. Knows no cluster; ``stage`` does what is named here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

Action = Literal["grow", "shrink", "shrink_to_one", "kill", "update"]
"""``grow`` and ``shrink`` by one replica are for arms without a rule; a rule decides that for itself."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A span of the run. ``load``: at its start and at its end, of the peak; ``actions``: when in it, and what."""

    length: float
    load: tuple[float, float]
    actions: tuple[tuple[float, Action], ...] = ()


SCENARIOS = {
    "ramp": Scenario(1.0, (0.3, 1.0)),
    "plateau": Scenario(1.0, (1.0, 1.0)),
    "scale_up": Scenario(2.25, (1.0, 1.0), ((0.0, "grow"),)),
    "scale_down": Scenario(1.5, (0.75, 0.75), ((0.0, "shrink"),)),
    "kill": Scenario(1.25, (0.75, 0.75), ((0.1, "kill"), (0.75, "kill"))),
    "update": Scenario(1.5, (0.75, 0.75), ((0.0, "update"),)),
    "low": Scenario(1.5, (0.1, 0.1)),
}
"""In this order, as one run. ``low``: the load has gone."""

TWO_PHASE = {
    "busy": Scenario(0.75, (1.0, 1.0)),
    "a_fortieth": Scenario(1.25, (0.025, 0.025), ((0.0, "shrink_to_one"),)),
}
"""A run of its own: the load all but ends, replicas go, and streams outlast their drain (dynamo#13559)."""


@dataclass(frozen=True, slots=True)
class Span:
    """A scenario in seconds of a run."""

    name: str
    start_s: float
    end_s: float
    scenario: Scenario


def timeline(scenarios: dict[str, Scenario], seconds: float) -> list[Span]:
    """Return the scenarios one after the other, ``seconds`` a unit of length."""
    spans: list[Span] = []
    for name, scenario in scenarios.items():
        start_s = spans[-1].end_s if spans else 0.0
        spans.append(Span(name, start_s, start_s + seconds * scenario.length, scenario))
    return spans


def actions_of(spans: Sequence[Span], seconds: float) -> Iterator[tuple[float, Action]]:
    """Yield what is to be done, and when in seconds of the run, in order."""
    for span in spans:
        for at, action in span.scenario.actions:
            yield span.start_s + at * seconds, action


def load_at(spans: Sequence[Span], at_s: float) -> float:
    """Return the offered load as a share of the peak; 0 when the run is over."""
    for span in spans:
        if span.start_s <= at_s < span.end_s:
            first, last = span.scenario.load
            return first + (last - first) * (at_s - span.start_s) / (span.end_s - span.start_s)
    return 0.0


def arrivals(spans: Sequence[Span], peak_per_s: float, rng: Random) -> Iterator[float]:
    """Yield times at random, as many a second as the load says: a Poisson process, thinned from one at the peak.

    Source: Lewis and Shedler, Simulation of nonhomogeneous Poisson processes by thinning (1979).
    """
    at_s = rng.expovariate(peak_per_s)
    while at_s < spans[-1].end_s:
        if rng.random() < load_at(spans, at_s):
            yield at_s
        at_s += rng.expovariate(peak_per_s)
