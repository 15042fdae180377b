"""Incidents, for current and for later watchers, and figures from before the first watcher."""

import pytest

from router.protocol.events import LoadReport
from serve_app.live import replicas as replicas_module
from tests.harness import eventually
from tests.serve_app.live.test_live import Ingresses, decoded, quick, until  # noqa: F401 (quick is used by all)
from tests.serve_app.live.traffic import is_idle

pytestmark = pytest.mark.anyio


async def test_operators_see_that_an_ingress_is_gone() -> None:
    """They see the number of ingresses that answer. A single failure does not count as silence of the others."""
    ingresses = Ingresses("i1", "i2")
    live = ingresses.first
    watcher = await live.watch(None)
    assert decoded(await watcher.take(1.0))[0]["ingresses_heard"] == 2
    ingresses.fails = True
    assert (await until(watcher, "ingresses_heard"))["ingresses_heard"] is None
    assert ingresses.failed >= 2
    ingresses.fails = False
    del ingresses.by_name["i2"]
    assert (await until(watcher, "ingresses_heard"))["ingresses_heard"] == 1
    live.leave(None, watcher)


async def test_figures_are_kept_without_watchers_and_sent_with_totals() -> None:
    """They cover both ingresses. A tenant sees only its own."""
    ingresses = Ingresses("i1", "i2")
    one, two = ingresses.by_name.values()
    for live, tenant in ((one, "a"), (two, "a"), (two, "b")):
        live.counts.add("warmpath_requests_total", endpoint="chat", status="200", tenant=tenant)
        live.counts.first_token(tenant, 0.25, 17, 12)
    assert is_idle(one)
    operator, tenant = await one.watch(None), await one.watch("b")
    (of_all,), (own,) = decoded(await operator.take(1.0)), decoded(await tenant.take(1.0))
    assert [sum(row["requests"] for row in seen["figures"]) for seen in (of_all, own)] == [3, 1]
    assert [seen["minute"]["requests"] for seen in (of_all, own)] == [3, 1]
    assert of_all["minute"]["ttft_p95_s"] == pytest.approx(0.25, rel=0.08)
    two.counts.add("warmpath_requests_total", endpoint="chat", status="429", tenant="a")
    told = await until(operator, "totals")
    assert (told["figures"][-1]["refused"], told["minute"]["refused"]) == (1, 1)
    assert [row["requests"] for row in told["totals"]] == [2, 1]
    one.leave(None, operator)
    one.leave("b", tenant)


async def test_operators_see_a_refused_configuration_until_it_is_fixed() -> None:
    """It has one row, also if several processes report it."""
    ingresses = Ingresses()
    operator, tenant = await ingresses.first.watch(None), await ingresses.first.watch("a")
    refused = [
        {"name": f"Replica {at}", "accepted": False, "why": "no such setting", "at_s": 9.0 - at} for at in (1, 2)
    ]
    ingresses.notices["configuration"] = refused
    told = await until(operator, "configuration")
    rows = [{"accepted": False, "why": "no such setting", "processes": 2, "at_s": 7.0}]
    assert told["configuration"] == rows
    assert (await ingresses.first.snapshot(None))["configuration"] == rows
    ingresses.notices["configuration"] = []
    assert (await until(operator, "configuration"))["configuration"] == []
    assert {event["type"] for event in decoded(await tenant.take(1.0))} == {"snapshot"}


async def test_later_watchers_see_how_a_replica_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaving replica that still reports was stopped, and a silent one died. Numbers are never reused."""
    monkeypatch.setattr(replicas_module, "QUIET_S", 0.5)
    ingresses = Ingresses()
    live, core = ingresses.first, ingresses.core

    def report(name: str) -> None:
        core.apply(name, [LoadReport(0, 0, 0, 8, 8, 1000.0)])

    watcher = await live.watch(None)
    for name in ("r1", "r2"):
        report(name)
    core.update_replicas([], away=["r1", "r2"])
    await until(watcher, lambda event: event["type"] == "replica" and event["state"] == "leaving")
    report("r2")
    await until(watcher, lambda event: event.get("replica") == "r1" and event.get("state") == "lost")
    core.update_replicas(["r3"])
    report("r3")
    await until(watcher, lambda event: event.get("replica") == "r3" and event.get("state") == "serving")
    live.reset(complete=True)

    async def four() -> bool:
        return len((await live.snapshot(None))["incidents"]) >= 4

    await eventually.until(four)
    incidents = (await live.snapshot(None))["incidents"]
    assert [(row["type"], row.get("number"), row.get("lost")) for row in incidents] == [
        ("replica_left", 1, True),
        ("replica_left", 2, False),
        ("joined", 3, None),
        ("reset", None, None),
    ]
    assert [row["type"] for row in (await live.snapshot("a"))["incidents"]] == [
        "replica_left",
        "replica_left",
        "joined",
    ]
    live.leave(None, watcher)
