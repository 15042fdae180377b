"""A replica loads the adapters that its requests need."""

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from router.protocol.block_hash import PrefixScope
from serve_app.checkpoints.adapter_registry import configured_adapters
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import AdapterError, AdapterSpec, EngineRequest, UnknownAdapter
from serve_app.replica.adapter_loader import ReplicaAdapters
from tests.serve_app.engine.adapters import save_plain, simulated_engine
from tests.serve_app.engine.tiny import Collector, prompt, request


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
