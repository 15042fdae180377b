"""Virtual time: callbacks at their moments, and sleep that runs what is due."""

from __future__ import annotations

import pytest

from benchmarks.common.virtual_clock import VirtualClock


def note(clock: VirtualClock, moment_s: float, name: str, seen: list[tuple[float, str]]) -> None:
    clock.at(moment_s, lambda: seen.append((clock(), name)))


def test_the_clock_runs_events_in_order() -> None:
    """By moment, then by scheduling; never into the past."""
    clock = VirtualClock()
    seen: list[tuple[float, str]] = []
    for moment_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        note(clock, moment_s, name, seen)
    clock.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]
    with pytest.raises(ValueError, match="past"):
        clock.at(1.0, clock.run)


def test_sleep_moves_on_and_runs_what_is_due() -> None:
    """What is scheduled later stays scheduled."""
    clock = VirtualClock()
    seen: list[tuple[float, str]] = []
    note(clock, 1.0, "due", seen)
    note(clock, 5.0, "later", seen)
    clock.sleep(3.0)
    assert (clock(), seen) == (3.0, [(1.0, "due")])
    clock.run()
    assert (clock(), seen[-1]) == (5.0, (5.0, "later"))
