"""A replica loads the adapters that its requests need."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from router.protocol.block_hash import PrefixScope
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import AdapterError, AdapterSpec, EngineRequest, UnknownAdapter
from serve_app.replica.adapter_loader import ReplicaAdapters
from tests.serve_app.engine.adapters import described, save_plain, simulated_engine
from tests.serve_app.engine.tiny import Collector, prompt, request

pytestmark = pytest.mark.anyio


def _request(request_id: str, adapter: AdapterSpec) -> EngineRequest:
    return request(request_id, prompt(40), 1, scope=PrefixScope("m", adapter.key))


@pytest.fixture
def specs(tmp_path: Path) -> list[AdapterSpec]:
    """Two adapters on disk."""
    return [described(save_plain(tmp_path / name), name)[0] for name in "ab"]


async def test_a_replica_that_was_never_told_loads_on_demand_once(specs: list[AdapterSpec]) -> None:
    """Twenty first requests at once cost one load; a request without a path, or for changed files, is refused."""
    wanted = specs[0]
    engine = simulated_engine()
    engine.start()
    replica = ReplicaAdapters(AppConfig(), engine)
    collector = Collector()
    await asyncio.gather(*(replica.submit(_request(f"r{i}", wanted), wanted.path, collector) for i in range(20)))
    collector.wait(f"r{i}" for i in range(20))
    assert [value for name, _, value in engine.stats().samples if name == "warmpath_lora_loads_total"] == [1]
    assert engine.unload_adapter(wanted.key)
    with pytest.raises(UnknownAdapter):
        await replica.submit(_request("x", wanted), "", collector)
    save_plain(Path(wanted.path), 7.0)
    with pytest.raises(AdapterError, match="changed"):
        await replica.submit(_request("x", wanted), wanted.path, collector)
    engine.stop()


async def test_an_adapter_evicted_while_its_request_was_on_its_way_is_loaded_again(specs: list[AdapterSpec]) -> None:
    """Room for one in memory, two in turns: every request finds its adapter."""
    engine = simulated_engine(max_loras=1, max_cpu_loras=1)
    engine.start()
    replica = ReplicaAdapters(AppConfig(), engine)
    collector = Collector()
    for i in range(6):
        adapter = specs[i % 2]
        await replica.submit(_request(f"r{i}", adapter), adapter.path, collector)
        collector.wait([f"r{i}"])
    assert set(collector.finish.values()) == {"length"}
    engine.stop()


async def test_only_loads_are_timed_and_smoothed(specs: list[AdapterSpec]) -> None:
    """An adapter that is in memory already takes no time and says nothing of what loading takes."""
    readings = iter([10.0, 12.0, 20.0, 30.0, 31.0])
    replica = ReplicaAdapters(AppConfig(), simulated_engine(), clock=lambda: next(readings))
    took = [replica.load_s]
    for adapter in (specs[0], *specs):
        assert await replica.load(adapter) == ""
        took.append(replica.load_s)
    assert took == [0.0, 2.0, 2.0, pytest.approx(1.7)]
