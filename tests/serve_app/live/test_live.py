"""An ingress' event stream without HTTP: from the first token to the watcher, over ingresses, and to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import pytest

from router.core import RoutingCore
from router.protocol.events import BlocksStored, LoadReport, StatsReport
from router.settings import RouterSettings
from serve_app.engine.protocol import SaveResult
from serve_app.errors import RateLimited
from serve_app.live import live as live_module
from serve_app.live import watcher as watcher_module
from serve_app.live.live import Live
from serve_app.live.peers import Peers
from serve_app.live.prefix_table import PrefixTable
from serve_app.live.watcher import Watcher
from tests.serve_app.live.traffic import BLOCK, chain_of, decision, generation

ABOUT = {"model": "m", "engine": "simulated", "simulated": True, "policy": "p", "block_size": BLOCK, "ingresses": 1}
Notices = dict[str, list[dict[str, Any]]]


class Ingresses:
    """Several ingresses in one process; ``calls``: how often their events were asked for."""

    def __init__(self, names: tuple[str, ...] = ("i1",), notices: Notices | None = None) -> None:
        self.core = RoutingCore("router", RouterSettings(block_size=BLOCK))
        self.core.update_replicas(["r1", "r2"])
        self.notices = notices or {}
        self.calls = 0
        self.dropped = 0
        self.by_name = {name: self._live(name, len(names) > 1) for name in names}
        self.first = self.by_name[names[0]]

    def _live(self, name: str, ask: bool) -> Live:
        async def ingresses(method: str, *arguments: Any, timeout_s: float) -> list[Any]:
            assert method == "recent_events"
            self.calls += 1
            return [each.recent(*arguments) for each in self.by_name.values()] if ask else []

        def count(events: int) -> None:
            self.dropped += events

        return Live(
            name,
            self.core,
            PrefixTable(BLOCK, lambda: 2),
            lambda: dict(ABOUT),
            lambda: self.notices,
            Peers(name, ingresses),
            count_dropped=count,
        )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes faster."""
    monkeypatch.setattr(live_module, "LOOK_S", 0.02)
    monkeypatch.setattr(live_module, "BOARD_S", 0.02)
    monkeypatch.setattr(live_module, "LEASE_S", 0.2)
    monkeypatch.setattr(watcher_module, "GATHER_S", 0.0)


def decoded(events: list[Any]) -> list[dict[str, Any]]:
    return [msgspec.json.decode(event.payload) for event in events]


async def until(watcher: Watcher, wanted: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """Return the first event that is wanted."""
    async with asyncio.timeout(30):
        while True:
            for event in decoded(await watcher.take(1.0)):
                if wanted(event):
                    return event


async def wait_for(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 (what is waited for tells nobody)
            await asyncio.sleep(0.01)


async def shown_requests(live: Live, viewer: str | None, requests: int) -> None:
    """Return once a snapshot has so many requests."""
    async with asyncio.timeout(30):
        while sum(row["requests"] for row in (await live.snapshot(viewer))["totals"]) != requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def run(work: Awaitable[None]) -> None:
    async def inner() -> None:
        await work

    asyncio.run(inner())


def test_an_operator_sees_replicas_prefixes_and_decisions() -> None:
    """The snapshot has what was asked before anybody watched; then come decisions, and holders as they change."""

    async def scenario() -> None:
        ingresses = Ingresses()
        live, core = ingresses.first, ingresses.core
        labels = (("engine", "simulated"),)
        pool = [
            ("warmpath_kv_cache_blocks", (*labels, ("state", state)), blocks)
            for state, blocks in (("used", 1.0), ("cached", 5.0), ("free", 2.0))
        ]
        report = LoadReport(100, 3, 1, 8, 8, 1000.0, 0.01)
        core.apply("r1", "e", [BlocksStored(chain_of("a", [1, 2, 3])), report, StatsReport(tuple(pool))])
        saved = SaveResult("saved")
        live.delivered(generation("a", [1, 2, 3, 4], 0, 2), decision(cached_tokens=12), 12, 0.5, saved)
        watcher = await live.watch(None)
        (snapshot,) = decoded(await watcher.take(1.0))
        assert (snapshot["type"], snapshot["viewer"], snapshot["simulated"]) == ("snapshot", "operator", True)
        first, second = snapshot["replicas"]
        assert first["replica"] == "r1"
        assert (first["blocks_total"], first["blocks_used"], first["blocks_reusable"]) == (8, 1, 5)
        assert (first["running"], first["queued_tokens"], first["state"]) == (3, 100, "serving")
        assert second["state"] == "joining"
        system, conversation = snapshot["prefixes"]
        assert (system["kind"], system["tokens"], system["pinned"], system["holders"]) == ("system", 8, True, {"r1": 8})
        assert conversation["parent"] == system["id"]
        assert (conversation["prefix_tokens"], conversation["tokens"], conversation["holders"]) == (16, 8, {"r1": 4})
        assert snapshot["totals"] == [{"tenant": "a", "requests": 1, "prompt_tokens": 17, "cached_tokens": 12}]
        assert snapshot["decisions"] == []

        live.delivered(generation("a", [1, 2, 3, 4], 0, 2, number=7), decision(cached_tokens=12), 12, 0.5, None)
        told = await until(watcher, lambda event: event["type"] == "decision")
        assert (told["request"], told["replica"], told["reason"]) == ("a-7.0", "r1", "cached")
        assert told["node"] == conversation["id"]
        assert (told["ttft_s"], told["cold_ttft_s"], told["queued_tokens"]) == (0.5, 0.512, 7)

        core.apply("r2", "e", [BlocksStored(chain_of("a", [1, 2]))])
        more = await until(watcher, lambda event: event["type"] == "prefixes" and "r2" in str(event["nodes"]))
        assert more["nodes"][0]["holders"] == {"r1": 8, "r2": 8}
        core.update_replicas(["r2"])
        assert (await until(watcher, lambda event: event["type"] == "replica_left"))["replica"] == "r1"
        live.reset(complete=True)
        assert (await until(watcher, lambda event: event["type"] == "reset"))["complete"]
        live.leave(None, watcher)

    run(scenario())


def test_replicas_work_is_summed_and_notices_are_told() -> None:
    """Evictions and pulls come by replica and second; joins, leaves and scaling as they are put up."""

    def stats(evicted: float, pulled: float) -> StatsReport:
        pull = ("warmpath_kv_pulls_total", (("outcome", "whole"),), pulled)
        tokens = ("warmpath_kv_pulled_tokens_total", (), pulled * 100)
        return StatsReport((("warmpath_prefix_cache_evicted_blocks_total", (), evicted), pull, tokens))

    async def scenario() -> None:
        ingresses = Ingresses()
        ingresses.core.apply("r1", "e", [stats(5.0, 1.0)])
        operator, tenant = await ingresses.first.watch(None), await ingresses.first.watch("a")
        ingresses.core.apply("r1", "e", [stats(12.0, 3.0)])
        evictions = await until(operator, lambda event: event["type"] == "evictions")
        assert (evictions["replica"], evictions["blocks"]) == ("r1", 7)
        ingresses.core.apply("r1", "e", [stats(12.0, 4.0)])
        pulls = await until(operator, lambda event: event["type"] == "pulls")
        assert (pulls["pulls"], pulls["tokens"]) == ({"whole": 1}, 100)
        ingresses.notices["prewarm"] = [{"replica_id": "r3", "state": "done", "blocks": 4, "at_s": 3.0}]
        moved = await until(operator, lambda event: event["type"] == "move")
        assert moved == {"type": "move", "kind": "prewarm", "replica": "r3", "state": "done", "blocks": 4, "at_s": 3.0}
        ingresses.notices["autoscaling"] = [{"from": 1, "target": 2, "reason": "ttft", "at_s": 4.0}]
        assert (await until(operator, lambda event: event["type"] == "scale"))["target"] == 2
        seen = {event["type"] for event in decoded(await tenant.take(1.0))}
        assert seen == {"snapshot"}

    run(scenario())


def test_a_tenant_sees_its_own_part() -> None:
    """Its decisions without what tells of others, replicas by name alone, and nothing of anybody else."""

    async def scenario() -> None:
        live = Ingresses().first
        watcher = await live.watch("b")
        for number, tenant in enumerate("ab"):
            live.delivered(generation(tenant, [1, 2, 3], 1, 2, "p@1", number), decision(), 0, 0.5, None)
        told = await until(watcher, lambda event: event["type"] == "decision")
        assert told["tenant"] == "b"
        assert not {"estimated_ttft_s", "cold_ttft_s", "queued_tokens"} & told.keys()
        await shown_requests(live, "b", 1)
        snapshot = await live.snapshot("b")
        assert [row["tenant"] for row in snapshot["totals"]] == ["b"]
        assert {row.tenant for row in snapshot["prefixes"]} == {None, "b"}
        assert {row.requests for row in snapshot["prefixes"]} == {1}
        assert [row.label for row in snapshot["prefixes"] if row.kind == "public"] == ["p@1"]
        assert all(row.keys() == {"replica", "state", "engine", "simulated"} for row in snapshot["replicas"])
        assert not {"moves", "scale"} & snapshot.keys()
        everything = await live.snapshot(None)
        assert {row.requests for row in everything["prefixes"] if row.kind == "public"} == {2}

    run(scenario())


def test_several_ingresses_are_seen_from_one() -> None:
    """Decisions, prefixes and totals of the others come too; when the watcher goes nobody is asked any more."""

    async def scenario() -> None:
        ingresses = Ingresses(("i1", "i2", "i3"))
        one, two, _ = ingresses.by_name.values()
        two.delivered(generation("a", [1, 2, 3]), decision(), 0, 0.5, None)
        watcher = await one.watch(None)
        (snapshot,) = decoded(await watcher.take(1.0))
        assert [(row["tenant"], row["requests"]) for row in snapshot["totals"]] == [("a", 1)]
        assert len(snapshot["prefixes"]) == 1
        one.delivered(generation("a", [1, 2, 3]), decision(), 0, 0.5, None)
        two.delivered(generation("a", [1, 2, 3], number=5), decision(), 0, 0.5, None)
        told = await until(watcher, lambda event: event.get("ingress") == "i2")
        assert told["request"] == "a-5.0"
        await shown_requests(one, None, 3)
        assert [row.requests for row in (await one.snapshot(None))["prefixes"]] == [3]
        one.leave(None, watcher)
        await wait_for(lambda: all(live.idle for live in ingresses.by_name.values()))
        calls = ingresses.calls
        two.delivered(generation("a", [1, 2, 3]), decision(), 0, 0.5, None)
        await asyncio.sleep(0.1)
        assert ingresses.calls == calls
        assert two.idle

    run(scenario())


def test_after_the_last_watcher_nothing_runs() -> None:
    """Streams that end in any order leave no task, no view and no event behind."""

    async def scenario() -> None:
        live = Ingresses().first
        tasks = len(asyncio.all_tasks())
        watchers = [(viewer, await live.watch(viewer)) for viewer in ("a", None, "a")]
        assert live.watchers == 3
        for viewer, watcher in watchers:
            live.leave(viewer, watcher)
            live.leave(viewer, watcher)  # again is harmless
        assert (live.watchers, live.idle) == (0, True)
        await wait_for(lambda: len(asyncio.all_tasks()) == tasks)
        live.delivered(generation("a", [1, 2]), decision(), 0, 0.5, None)
        assert live.idle

    run(scenario())


def test_a_slow_watcher_loses_the_oldest_and_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is bounded; it is told how many it lost, and gets a snapshot that has them."""
    monkeypatch.setattr(watcher_module, "QUEUE_EVENTS", 4)

    async def scenario() -> None:
        ingresses = Ingresses()
        live = ingresses.first
        watcher = await live.watch("a")
        for number in range(10):
            live.delivered(generation("a", [1, 2], number=number), decision(), 0, 0.5, None)
        assert await watcher.take(1.0) == []
        dropped, snapshot = decoded(live.resync("a", watcher))
        assert (dropped["type"], dropped["events"]) == ("dropped", ingresses.dropped)
        assert dropped["events"] >= 11
        assert [each["request"] for each in snapshot["decisions"]] == [f"a-{number}.0" for number in range(10)]
        live.delivered(generation("a", [1, 2], number=11), decision(), 0, 0.5, None)
        assert (await until(watcher, lambda event: event["type"] == "decision"))["request"] == "a-11.0"
        live.leave("a", watcher)

    run(scenario())


def test_streams_of_one_viewer_are_bounded() -> None:
    """The fifth of a tenant is refused, whatever others have; one that ends makes room."""

    async def scenario() -> None:
        live = Ingresses().first
        mine = [await live.watch("a") for _ in range(4)]
        with pytest.raises(RateLimited):
            await live.watch("a")
        await live.watch("b")
        live.leave("a", mine[0])
        await live.watch("a")

    run(scenario())


def test_what_goes_wrong_here_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the table is logged; the dispatcher goes on."""

    async def scenario() -> None:
        live = Ingresses().first
        monkeypatch.setattr(PrefixTable, "add", None)
        live.delivered(generation("a", [1, 2]), decision(), 0, 0.5, None)

    run(scenario())
