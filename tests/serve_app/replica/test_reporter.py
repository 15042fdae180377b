"""A replica tells its load when it changes and no more often, sends requests on, makes engines, loads adapters."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from msgspec import structs

from router.background import BackgroundLoops
from router.protocol.block_hash import PrefixScope
from router.protocol.events import LoadReport, StatsReport
from router.protocol.request import Decision
from serve_app.checkpoints.adapter_registry import configured_adapters
from serve_app.checkpoints.sources import load_served_model
from serve_app.config.app import AppConfig
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import (
    AdapterError,
    AdapterSpec,
    CheckpointInfo,
    EngineOutput,
    EngineRequest,
    Save,
    UnknownAdapter,
    output_of_wire,
)
from serve_app.replica.adapter_loader import ReplicaAdapters
from serve_app.replica.engine_factory import make_engine
from serve_app.replica.replica import Replica
from serve_app.replica.reporter import Reporter
from tests.harness.virtual_time import passes, run_at_once
from tests.serve_app.engine.adapters import save_plain, simulated_engine
from tests.serve_app.engine.tiny import Collector, prompt, request

pytestmark = pytest.mark.anyio

IDLE = LoadReport(0, 0, 0, 8, 16, 100.0)


class Bench:
    """A reporter over an engine with a load set by the test; ``loads``: the reported ones."""

    def __init__(self, interval_s: float) -> None:
        self.load = IDLE
        self.loads: list[LoadReport] = []
        self.heard = asyncio.Event()
        feed = MagicMock()
        feed.put.side_effect = self._put
        self.reporter = Reporter(lambda: self.load, lambda: StatsReport(()), feed, interval_s)

    def _put(self, events: list[Any]) -> None:
        self.loads += [event for event in events if isinstance(event, LoadReport)]
        self.heard.set()

    async def next(self) -> LoadReport:
        self.heard.clear()
        await asyncio.wait_for(self.heard.wait(), 30)
        return self.loads[-1]


@pytest.mark.parametrize("news", [True, False])
def test_a_prefill_that_changes_is_told_at_once(news: bool) -> None:
    """With an interval of an hour a report is sent when a prefill arrives or ends, and only then."""
    bench = Bench(3600.0)

    async def changed() -> None:
        task = asyncio.create_task(bench.reporter.run())
        assert await bench.next() == IDLE
        for tokens in (500, 900):
            bench.load = structs.replace(IDLE, queued_prefill_tokens=tokens)
            if news:
                bench.reporter.prefills_changed()
                bench.reporter.prefills_changed()
                await bench.next()
            await passes(1000.0)
        task.cancel()

    run_at_once(changed())
    assert [load.queued_prefill_tokens for load in bench.loads] == ([0, 500, 900] if news else [0])


def test_a_load_that_changes_otherwise_is_told_within_the_interval() -> None:
    """Decodes begin and end without a change of prefills; nothing is reported twice."""
    bench = Bench(0.01)

    async def changed() -> None:
        task = asyncio.create_task(bench.reporter.run())
        await bench.next()
        bench.load = structs.replace(IDLE, running_sequences=3)
        assert (await bench.next()).running_sequences == 3
        await passes(0.5)
        task.cancel()

    run_at_once(changed())
    assert len([load for load in bench.loads if load.running_sequences == 3]) == 1


async def test_reports_go_on_after_an_error() -> None:
    """Routers would take a replica for dead that no longer reports, and its health check would pass."""
    bench, failures = Bench(0.001), iter([True, True])

    def load() -> LoadReport:
        if next(failures, False):
            raise OSError("no load")
        return bench.load

    bench.reporter.load = load
    task = asyncio.create_task(BackgroundLoops().keep_running(bench.reporter.run, 0.0))
    assert await bench.next() == IDLE
    task.cancel()


LOAD = LoadReport(5000, 0, 1, 8, 16, 1000.0, taken_at_s=3.0)
REQUEST = request("q", [0], 1)


class Begun(Exception):
    """The replica took the request."""


def asked(
    decision: Decision | None, only: CheckpointInfo | None = None, request: EngineRequest = REQUEST
) -> EngineOutput:
    """Ask a replica with ``LOAD`` and return its first chunk. Raises Begun, with the request, if it takes that."""

    def begin(request: EngineRequest, _: Any) -> None:
        raise Begun(request)

    replica: Any = SimpleNamespace(
        _replica_id="me",
        _tracer=None,
        _running=SimpleNamespace(closed=False, begin=begin),
        _engine=SimpleNamespace(load=lambda: LOAD, adapters=SimpleNamespace(loaded=())),
        _adapters=SimpleNamespace(load_s=0.5),
        _puller=SimpleNamespace(tokens_per_s=7.0),
        _attributes={"zone": "a"},
        _only=only,
    )

    replica._load = partial(Replica._load, replica)
    return output_of_wire(asyncio.run(Replica.generate(replica, structs.replace(request, decision=decision))))


def test_a_replica_of_one_of_several_models_reads_what_was_made_for_other_weights() -> None:
    """Under its name, by an ingress of the time before: without any KV, as neither may have the other's.

    With another tokenizer, or an adapter, it cannot: the prompt's ids would mean other words.
    """
    own = CheckpointInfo(Path(), REQUEST.scope.model, 8, 8, (), "ids")
    other = replace(REQUEST.scope, model="another", public_blocks=1)
    made = structs.replace(
        REQUEST, scope=other, tokenizer="ids", block_hashes=b"h" * 16, saves=(Save(b"", 1),), root=b"r" * 32
    )
    assert asked(None, own, structs.replace(made, tokenizer="others")).error == "other_model"
    adapted = structs.replace(made, scope=replace(other, lora="pirate"))
    assert asked(None, own, adapted).error == "other_model"
    with pytest.raises(Begun) as begun:
        asked(None, own)
    assert begun.value.args[0].store_kv and begun.value.args[0].scope == REQUEST.scope
    roots = set()
    for _ in range(2):
        with pytest.raises(Begun) as begun:
            asked(None, own, made)
        taken = begun.value.args[0]
        assert (taken.scope, taken.block_hashes, taken.saves) == (REQUEST.scope, b"", ()) and not taken.store_kv
        assert taken.token_ids.tolist() == made.token_ids.tolist()
        roots.add(taken.root)
    assert len(roots) == 2 and all(len(root) == 16 for root in roots)


async def test_a_replica_that_is_stopped_at_its_start_ends_what_it_has_begun() -> None:
    """Its engine's threads and its slot of the disk, although it never took a request."""
    ended: list[str] = []
    ending = AsyncExitStack()
    ending.callback(ended.append, "engine")
    stopped: Any = SimpleNamespace(_ending=ending)
    await Replica.__del__(stopped)
    assert ended == ["engine"]


def test_old_news_is_answered_with_the_load() -> None:
    """The load is complete, as in the feed, and arrives in a chunk's wire format."""
    chunk = asked(Decision("me", "router", 1, 0, 0, "cold", queued_tokens=0))
    assert (chunk.error, chunk.request_id) == ("rerouted", "q")
    assert chunk.load == structs.replace(LOAD, pull_tokens_per_s=7.0, adapter_load_s=0.5, attributes={"zone": "a"})


@pytest.mark.parametrize("queued", [5000, 9000, None])
def test_a_request_with_current_information_is_taken(queued: int | None) -> None:
    """The work is as much as believed, less, or not checked at all."""
    with pytest.raises(Begun):
        asked(Decision("me", "router", 1, 0, 0, "cold", queued_tokens=queued))
    with pytest.raises(Begun):
        asked(None)


def test_settings_of_equal_names_have_equal_values(demo_model_path: Path) -> None:
    """Settings with other names, or computed ones, have their right values too."""
    tenants = [{"name": name, "key_sha256": [name * 64], "cache_share": share} for name, share in (("a", 1), ("b", 3))]
    fields = {"max_num_seqs": 3, "num_blocks": 50, "pin_budget": 0.5, "host_cache_bytes": 1 << 20, "num_threads": 2}
    config = AppConfig.model_validate(
        {"model": str(demo_model_path), "engine": "simulated", "tenants": tenants, **fields}
    )
    engine = make_engine(config, load_served_model(config), lambda _: None)
    assert isinstance(engine, TorchEngine)
    settings = engine.settings
    assert (settings.max_num_seqs, settings.num_blocks, settings.num_threads) == (3, 50, 2)
    assert (settings.pin_budget_blocks, settings.tiers.host_cache_bytes) == (25, 1 << 20)
    assert settings.tenant_shares == config.cache_shares != {}


def _request(request_id: str, adapter: AdapterSpec, path: str) -> EngineRequest:
    return structs.replace(request(request_id, prompt(40), 1, scope=PrefixScope("m", adapter.key)), lora_path=path)


def test_a_replica_that_was_never_told_loads_on_demand_once(tmp_path: Path) -> None:
    """Twenty first requests at once cost one load; a request without a path, or for changed files, is refused."""
    (entry,) = configured_adapters({"a": save_plain(tmp_path / "a")})
    assert entry.spec is not None
    wanted = entry.spec
    engine = simulated_engine()
    engine.start()
    replica = ReplicaAdapters(AppConfig(), engine)
    collector = Collector()

    async def flood() -> None:
        await asyncio.gather(*(replica.submit(_request(f"r{i}", wanted, wanted.path), collector) for i in range(20)))

    asyncio.run(flood())
    collector.wait(f"r{i}" for i in range(20))
    assert [value for name, _, value in engine.stats().samples if name == "warmpath_lora_loads_total"] == [1]
    assert engine.adapters.unload(wanted.key)
    with pytest.raises(UnknownAdapter):
        asyncio.run(replica.submit(_request("x", wanted, ""), collector))
    save_plain(tmp_path / "a", 7.0)
    with pytest.raises(AdapterError, match="changed"):
        asyncio.run(replica.submit(_request("x", wanted, wanted.path), collector))
    engine.stop()


def test_an_adapter_evicted_while_its_request_was_on_its_way_is_loaded_again(tmp_path: Path) -> None:
    """With space for one in memory and two alternating, every request finds its adapter."""
    both = [entry.spec for entry in configured_adapters({n: save_plain(tmp_path / n) for n in "ab"})]
    engine = simulated_engine(max_loras=1, max_cpu_loras=1)
    engine.start()
    replica = ReplicaAdapters(AppConfig(), engine)
    collector = Collector()
    for i in range(6):
        adapter = both[i % 2]
        assert adapter is not None
        asyncio.run(replica.submit(_request(f"r{i}", adapter, adapter.path), collector))
        collector.wait([f"r{i}"])
    assert set(collector.finish.values()) == {"length"}
    engine.stop()


def test_only_loads_are_timed_and_smoothed(tmp_path: Path) -> None:
    """An adapter already in memory takes no time and does not affect the load time."""
    both = [entry.spec for entry in configured_adapters({n: save_plain(tmp_path / n) for n in "ab"})]
    readings = iter([10.0, 12.0, 20.0, 30.0, 31.0])
    replica = ReplicaAdapters(AppConfig(), simulated_engine(), clock=lambda: next(readings))
    took = [replica.load_s]
    for adapter in (both[0], both[0], both[1]):
        assert asyncio.run(replica.load(adapter)) == ""
        took.append(replica.load_s)
    assert took == [0.0, 2.0, 2.0, pytest.approx(1.7)]
