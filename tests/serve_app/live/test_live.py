"""An ingress' event stream without HTTP: from the first token to watchers, across ingresses, and its end."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from router.core import RoutingCore
from router.protocol.events import ENDS_TIER, POOL_TIER, BlocksStored, LoadReport, StatsReport
from router.settings import RouterSettings
from serve_app.engine.protocol import FirstToken, SaveResult
from serve_app.errors import RateLimited
from serve_app.live import live as live_module
from serve_app.live import view as watcher_module
from serve_app.live.live import Live
from serve_app.live.prefixes import PrefixTable
from serve_app.live.view import Watcher
from tests.harness import eventually
from tests.serve_app.live.traffic import BLOCK, chain_of, decision, generation, is_idle

ABOUT = {"model": "m", "engine": "simulated", "simulated": True, "policy": "p", "block_size": BLOCK, "ingresses": 1}
pytestmark = pytest.mark.anyio


class Ingresses:
    """Several ingresses in one process. ``calls``: the requests for their events; ``fails``: whether these fail."""

    def __init__(self, *names: str) -> None:
        self.core = RoutingCore("router", RouterSettings(block_size=BLOCK))
        self.core.update_replicas(["r1", "r2"])
        self.notices: dict[str, list[dict[str, Any]]] = {}
        self.calls = self.failed = 0
        self.fails = False
        self.by_name = {name: self._live(name) for name in names or ("i1",)}
        self.first = next(iter(self.by_name.values()))

    def _live(self, name: str) -> Live:
        async def ingresses(method: str, *arguments: Any, timeout_s: float) -> list[Any]:
            assert method == "recent_events"
            self.calls += 1
            if self.fails:
                self.failed += 1
                raise ConnectionError
            return [each.recent(*arguments) for each in self.by_name.values()] if len(self.by_name) > 1 else []

        table = PrefixTable(BLOCK, lambda: 2)
        return Live(name, self.core, table, lambda: dict(ABOUT), lambda: self.notices, ingresses)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"LOOK_S": 0.02, "BOARD_S": 0.02, "LEASE_S": 0.2}.items():
        monkeypatch.setattr(live_module, name, seconds)
    monkeypatch.setattr(watcher_module, "GATHER_S", 0.0)


def decoded(events: list[Any]) -> list[dict[str, Any]]:
    return [msgspec.json.decode(event.payload) for event in events]


async def until(watcher: Watcher, wanted: Callable[[Mapping[str, Any]], bool] | str) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while True:
            for event in decoded(await watcher.take(1.0)):
                if event["type"] == wanted if isinstance(wanted, str) else wanted(event):
                    return event


async def shown_requests(live: Live, viewer: str | None, requests: int) -> dict[str, Any]:
    snapshot: dict[str, Any] = {}

    async def shown() -> bool:
        snapshot.update(await live.snapshot(viewer))
        return sum(row["requests"] for row in snapshot["totals"]) == requests

    await eventually.until(shown)
    return snapshot


def send(live: Live, tenant: str, *blocks: int, number: int = 0, cached: int = 0, **more: Any) -> None:
    """Deliver a generation's first token."""
    asked = generation(tenant, blocks or (1, 2, 3), number=number, **more)
    live.delivered(asked, decision(cached_tokens=cached), FirstToken(cached), 0.5)
    live.counts.first_token(tenant, 0.5, len(asked.token_ids), cached)


async def test_an_operator_sees_replicas_prefixes_and_decisions() -> None:
    """The snapshot has the requests before the first watcher. Decisions and changes of holders follow."""
    ingresses = Ingresses()
    live, core = ingresses.first, ingresses.core
    pool = tuple(
        ("warmpath_kv_cache_blocks", (("engine", "simulated"), ("state", state)), blocks)
        for state, blocks in (("used", 1.0), ("cached", 5.0), ("free", 2.0))
    )
    report = LoadReport(100, 3, 1, 8, 8, 1000.0)
    place = ("warmpath_replica_info", (("pid", "7"), ("node", "berth-7"), ("gpu", "")), 1.0)
    core.apply("r1", [BlocksStored(chain_of("a", [1, 2, 3])), report, StatsReport((*pool, place))])
    saved = SaveResult("saved")
    live.delivered(generation("a", [1, 2, 3, 4], 0, 2), decision(cached_tokens=12), FirstToken(12, save=saved), 0.5)
    live.counts.first_token("a", 0.5, 17, 12)
    watcher = await live.watch(None)
    (snapshot,) = decoded(await watcher.take(1.0))
    assert (snapshot["type"], snapshot["viewer"], snapshot["simulated"]) == ("snapshot", "operator", True)
    first, second = snapshot["replicas"]
    assert first["replica"] == "r1"
    assert (first["blocks_total"], first["blocks_used"], first["blocks_reusable"]) == (8, 1, 5)
    assert (first["running"], first["queued_tokens"], first["state"]) == (3, 100, "serving")
    assert (second["state"], first["number"], second["number"]) == ("joining", 1, 2)
    assert (first["node"], "gpu" in first) == ("berth-7", False)
    system, conversation = snapshot["prefixes"]
    assert (system["kind"], system["tokens"], system["pinned"], system["holders"]) == ("system", 8, True, {"r1": 8})
    assert conversation["parent"] == system["id"]
    assert (conversation["prefix_tokens"], conversation["tokens"], conversation["holders"]) == (16, 8, {"r1": 4})
    assert snapshot["totals"] == [{"tenant": "a", "requests": 1, "prompt_tokens": 17, "cached_tokens": 12}]
    assert snapshot["decisions"] == []

    send(live, "a", 1, 2, 3, 4, system_blocks=2, number=7, cached=12)
    told = await until(watcher, "decision")
    assert (told["request"], told["ingress"], told["replica"], told["reason"]) == ("a-7.0", "i1", "r1", "cached")
    assert told["node"] == conversation["id"]
    assert (told["ttft_s"], told["cold_ttft_s"], told["queued_tokens"]) == (0.5, 0.512, 7)

    core.apply("r2", [BlocksStored(chain_of("a", [1, 2]))])
    more = await until(watcher, lambda event: event["type"] == "prefixes" and "r2" in str(event["nodes"]))
    assert more["nodes"][0]["holders"] == {"r1": 8, "r2": 8}
    core.update_replicas(["r2"])
    left = await until(watcher, "replica_left")
    assert (left["replica"], left["number"], left["lost"]) == ("r1", 1, True)
    live.reset(complete=True)
    assert (await until(watcher, "reset"))["complete"]
    await until(watcher, lambda event: event["type"] == "prefixes" and not event["nodes"][0]["pinned"])
    live.leave(None, watcher)


@pytest.mark.parametrize("pool", [POOL_TIER, ENDS_TIER])
async def test_the_pool_is_not_listed_as_a_tier(pool: str) -> None:
    live, core = (ingresses := Ingresses()).first, ingresses.core
    core.apply("r1", [BlocksStored(chain_of("a", [1, 2]), pool), BlocksStored(chain_of("a", [1]), "host")])
    assert (await live.snapshot(None))["replicas"][0]["tier_blocks"] == {"host": 1}


async def test_replicas_work_is_summed_and_only_operators_see_notices() -> None:
    """Evictions and pulls are summed by replica and second. Joins, leaves and scaling come from notices."""

    def stats(evicted: float, pulled: float) -> StatsReport:
        pull = ("warmpath_kv_pulls_total", (("outcome", "whole"),), pulled)
        tokens = ("warmpath_kv_pulled_tokens_total", (), pulled * 100)
        return StatsReport((("warmpath_prefix_cache_evicted_blocks_total", (), evicted), pull, tokens))

    ingresses = Ingresses()
    ingresses.core.apply("r1", [stats(5.0, 1.0)])
    operator, tenant = await ingresses.first.watch(None), await ingresses.first.watch("a")
    ingresses.core.apply("r2", [LoadReport(0, 0, 0, 8, 8, 1000.0), stats(50.0, 5.0)])
    assert (await until(operator, "replica"))["replica"] == "r2", "its earlier work is not counted"
    ingresses.core.apply("r1", [stats(12.0, 1.0)])
    evictions = await until(operator, "evictions")
    assert (evictions["replica"], evictions["blocks"]) == ("r1", 7)
    ingresses.core.apply("r1", [stats(12.0, 2.0)])
    pulls = await until(operator, "pulls")
    assert (pulls["pulls"], pulls["tokens"]) == ({"whole": 1}, 100)
    ingresses.notices["prewarm"] = [{"replica_id": "r3", "state": "done", "blocks": 4, "at_s": 3.0}]
    moved = await until(operator, "move")
    assert moved == {"type": "move", "kind": "prewarm", "replica": "r3", "state": "done", "blocks": 4, "at_s": 3.0}
    ingresses.notices["autoscaling"] = [{"from": 1, "target": 2, "reason": "ttft", "at_s": 4.0}]
    assert (await until(operator, "scale"))["target"] == 2
    assert {event["type"] for event in decoded(await tenant.take(1.0))} == {"snapshot", "replica"}


async def test_a_tenant_sees_its_own_part() -> None:
    """It also sees its own counts of a public prompt, and replicas without their load."""
    live = Ingresses().first
    watcher = await live.watch("b")
    for tenant in "ab":
        send(live, tenant, public_blocks=1, system_blocks=2, ref="p@1")
    assert (await until(watcher, "decision"))["tenant"] == "b"
    snapshot, everything = await shown_requests(live, "b", 1), await live.snapshot(None)
    assert [row["tenant"] for row in snapshot["totals"]] == ["b"]
    assert {(row.tenant, row.requests) for row in snapshot["prefixes"]} == {(None, 1), ("b", 1)}
    assert [(row.label, row.requests) for row in everything["prefixes"] if row.kind == "public"] == [("p@1", 2)]
    assert all(row.keys() == {"replica", "number", "state", "engine", "simulated"} for row in snapshot["replicas"])
    assert not {"moves", "scale", "configuration", "ingresses_heard"} & snapshot.keys()


async def test_a_miss_is_told_to_its_tenant_and_to_operators() -> None:
    """At every ingress, without the text of a prompt; of many at once the rest is counted."""
    ingresses = Ingresses("i1", "i2")
    one, two = ingresses.by_name.values()
    operator, other = await one.watch(None), await one.watch("b")
    facts = {"reason": "time", "lost_tokens": 9, "part": "system", "line": 2, "advice": "Move it."}
    two.missed(generation("a", (1,)), facts)
    told = await until(operator, "miss")
    assert told == {"type": "miss", "at_s": told["at_s"], "request": "a-0.0", "tenant": "a", **facts}
    for number in range(100):
        one.missed(generation("a", (1,), number=number), facts)
    assert 0 < (await until(operator, "skipped"))["misses"] <= 81
    assert "miss" not in {event["type"] for event in decoded(await other.take(1.0))}
    for viewer, watcher in ((None, operator), ("b", other)):
        one.leave(viewer, watcher)


async def test_one_ingress_shows_the_events_of_all() -> None:
    """It includes the others' decisions, prefixes and totals. Without a watcher it stops asking."""
    ingresses = Ingresses("i1", "i2", "i3")
    one, two, _ = ingresses.by_name.values()
    send(two, "a")
    watcher = await one.watch(None)
    (snapshot,) = decoded(await watcher.take(1.0))
    assert [(row["tenant"], row["requests"]) for row in snapshot["totals"]] == [("a", 1)]
    assert len(snapshot["prefixes"]) == 1
    send(one, "a")
    for number in (5, 6):
        send(two, "a", number=number)
        told = await until(watcher, lambda event: event.get("ingress") == "i2")
        assert told["request"] == f"a-{number}.0", "each once"
    snapshot = await shown_requests(one, None, 4)
    assert [row.requests for row in snapshot["prefixes"]] == [4]
    one.leave(None, watcher)
    await asyncio.sleep(live_module.LEASE_S)
    calls = ingresses.calls
    for live in ingresses.by_name.values():
        send(live, "a")
    await asyncio.sleep(0.1)
    assert ingresses.calls == calls
    assert all(is_idle(live) for live in ingresses.by_name.values())


async def test_after_the_last_watcher_nothing_runs() -> None:
    """Streams may end in any order, and leave no task, view or event behind."""
    live = Ingresses().first
    tasks = len(asyncio.all_tasks())
    watchers = [(viewer, await live.watch(viewer)) for viewer in ("a", None, "a")]
    assert live.watchers == 3
    send(live, "a")
    for viewer, watcher in watchers:
        live.leave(viewer, watcher)
        live.leave(viewer, watcher)  # a repeated call is harmless
    assert (live.watchers, is_idle(live)) == (0, True)
    await eventually.until(lambda: len(asyncio.all_tasks()) == tasks)
    send(live, "a")
    assert is_idle(live)


async def test_a_slow_watcher_loses_the_oldest_events_and_gets_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is bounded. It gets the number of lost events, and a snapshot that includes them."""
    monkeypatch.setattr(watcher_module, "QUEUE_EVENTS", 4)
    ingresses = Ingresses()
    live = ingresses.first
    watcher = await live.watch("a")
    for number in range(10):
        send(live, "a", number=number)
    assert await watcher.take(1.0) == []
    dropped, snapshot = decoded(live.resync("a", watcher))
    assert (dropped["type"], dropped["events"]) == ("dropped", live.counts.values["warmpath_dropped_events_total", ()])
    assert dropped["events"] >= 11
    assert [each["request"] for each in snapshot["decisions"]] == [f"a-{number}.0" for number in range(10)]
    send(live, "a", number=11)
    assert (await until(watcher, "decision"))["request"] == "a-11.0"
    live.leave("a", watcher)


async def test_streams_per_viewer_are_limited_and_faults_cost_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's fifth stream is refused, independently of others, until one ends. Faults are only logged."""
    live = Ingresses().first
    mine = [await live.watch("a") for _ in range(4)]
    with pytest.raises(RateLimited):
        await live.watch("a")
    await live.watch("b")
    live.leave("a", mine[0])
    await live.watch("a")
    monkeypatch.setattr(PrefixTable, "add", None)
    send(live, "a")
