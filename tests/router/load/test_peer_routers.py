"""Routers that decide beside each other are counted while they are active."""

from __future__ import annotations

from router.load.load_table import LoadTable
from router.protocol.events import LoadReport


def report(**admitted: int) -> LoadReport:
    return LoadReport(0, 0, 0, 0, 0, 1000.0, admitted)


def test_routers_that_go_quiet_are_not_counted() -> None:
    """A replica remembers routers for long; who sends nothing new for half a minute is not active."""
    loads = LoadTable("me")
    loads.add_replica("r0")
    assert loads.active_routers == 1
    loads.report("r0", report(me=3, you=5, them=1), 0.0)
    assert loads.active_routers == 3
    loads.report("r0", report(me=4, you=6, them=1), 20.0)
    loads.report("r0", report(me=4, you=6, them=1), 35.0)
    assert loads.active_routers == 2
    loads.report("r0", report(me=4, you=6, them=1), 100.0)
    assert loads.active_routers == 1
