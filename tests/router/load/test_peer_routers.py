"""Routers that decide beside each other: counted while active, and kept apart only as far as they are in the dark."""

from __future__ import annotations

from random import Random

import pytest
from msgspec import structs

from router.core import RoutingCore
from router.load.load_table import LoadTable
from router.protocol.events import BlocksStored, LoadReport, RouterShare
from router.protocol.request import RoutedRequest

NAMES = [f"r{n}" for n in range(8)]


def report(**last: int) -> LoadReport:
    shares = tuple(RouterShare(name, number, 0) for name, number in last.items())
    return LoadReport(0, 0, 0, 0, 0, 1000.0, 0.01, shares)


def table(me: str, routers: list[str]) -> LoadTable:
    loads = LoadTable(me)
    for name in NAMES:
        loads.add_replica(name)
        loads.report(name, report(**dict.fromkeys(routers, 1)), 0.0)
    return loads


def test_routers_that_go_quiet_are_not_counted() -> None:
    """A replica remembers routers for long; who sends nothing new for half a minute is not active."""
    loads = table("me", [])
    assert loads.active_routers == 1
    loads.report("r0", report(me=3, you=5, them=1), 0.0)
    assert loads.active_routers == 3
    loads.report("r0", report(me=4, you=6, them=1), 20.0)
    loads.report("r0", report(me=4, you=6, them=1), 35.0)
    assert loads.active_routers == 2
    loads.report("r0", report(me=4, you=6, them=1), 100.0)
    assert loads.active_routers == 1


@pytest.mark.parametrize("routers", [["a"], ["a", "b"], ["a", "b", "c"], [f"x{n}" for n in range(20)]])
def test_replicas_are_shared_out_whole(routers: list[str]) -> None:
    """Each replica is some router's own; every router has one; one router alone leaves nothing to others."""
    own: set[str] = set()
    for me in routers:
        loads = table(me, routers)
        for _ in range(200):
            loads.reserve("r0", 10, 0.0)
        left_to_peers = loads.left_to_peers
        if len(routers) == 1:
            assert left_to_peers is None
            return
        assert left_to_peers is not None
        assert set(left_to_peers.tolist()) == {0.0, 1.0}
        own |= {name for name, left in zip(loads.replica_ids, left_to_peers.tolist(), strict=True) if left == 0.0}
    assert own == set(NAMES)


def test_who_sees_everything_keeps_to_nothing() -> None:
    """Reports that follow each request at once, or a release, leave nothing unseen."""
    loads = table("a", ["a", "b"])
    for number in range(2, 100):
        reserved = loads.reserve("r0", 10, 0.0)
        if number % 2:
            loads.release(reserved)
        else:
            loads.report("r0", report(a=reserved, b=1), 0.0)
    assert loads.left_to_peers is None
    for _ in range(10):
        loads.reserve("r0", 10, 0.0)
    assert loads.left_to_peers is not None
    loads.remove_replica("r0")
    for _ in range(200):
        loads.release(loads.reserve("r1", 10, 0.0))
    assert loads.left_to_peers is None


def cores(queued: dict[str, int]) -> list[RoutingCore]:
    """Eight routers with one view, who know from earlier that they do not see each other's requests."""
    made = []
    for me in NAMES:
        core = RoutingCore(me, clock=lambda: 0.0)
        core.update_replicas(NAMES)
        for name in NAMES:
            core.apply(name, "e", [report(**dict.fromkeys(NAMES, 1))])
        for number in range(40):
            core.decide(RoutedRequest(f"before {number}", b"", 100, number.to_bytes(16, "big")))
        for name in NAMES:
            seen = report(**dict.fromkeys(NAMES, 10_000))
            core.apply(name, "e", [structs.replace(seen, queued_prefill_tokens=queued.get(name, 0))])
        made.append(core)
    return made


def choices(made: list[RoutingCore], tokens: int) -> set[str]:
    decisions = [core.decide(RoutedRequest("now", b"", tokens, b"k" * 16)) for core in made]
    return {decision.replica_id for decision in decisions if decision is not None}


def test_a_burst_over_blind_routers_is_spread() -> None:
    """Where one replica is a little less busy than the others, not all of the burst goes there. (docs/routing.md)"""
    queued = {name: 1000 + 50 * at for at, name in enumerate(NAMES)}
    assert len(choices(cores(queued), 2000)) == 8


def test_blind_routers_agree_on_a_cold_prompt_while_replicas_are_idle() -> None:
    """Rendezvous order decides then, so that one prompt is computed once. (docs/routing.md)"""
    assert len(choices(cores({}), 2000)) == 1


def test_affinity_is_stronger_than_keeping_apart() -> None:
    """A little new text behind a long cached prefix goes to its holder, whichever router it comes to.

    docs/routing.md
    """
    made = cores({name: 1000 + 50 * at for at, name in enumerate(NAMES)})
    chain = Random(3).randbytes(16 * 200)
    chosen = set()
    for core in made:
        core.apply("r6", "e", [BlocksStored(chain)])
        decision = core.decide(RoutedRequest("now", chain, 3300, b"k" * 16))
        assert decision is not None
        chosen.add(decision.replica_id)
    assert chosen == {"r6"}
