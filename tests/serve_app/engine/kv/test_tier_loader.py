"""Blocks evicted from the pool return from host memory and disk, and change no token."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.protocol.block_hash import PrefixScope, TokenArray, hash_blocks, split_chain
from router.protocol.events import BlocksStored, Event
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.cache.tiers import disk as disk_tier
from serve_app.config.cache import CacheSection
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from tests.harness.tiers import tier_settings
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.simulated import MakeSimulated
from tests.serve_app.engine.tiny import SCOPE, SECRET, Collector, prompt, request, run_all, sample

BLOCK = 2 * 2 * 16 * 2 * 16 * 4
"""Bytes of a block of the tiny fp32 model."""

SMALL = {"num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def tiers(kind: str, directory: Path, blocks: int = 400) -> CacheSection:
    """Return tiers that are always worth a load: "host", "disk" or twenty blocks of host memory over a disk."""
    host = {"host": blocks, "disk": 0, "both": 20}[kind] * BLOCK
    disk = 0 if kind == "host" else blocks * 2 * BLOCK
    return tier_settings(host, disk, directory, tier_load_ratio=1e9)


def settle(engine: TorchEngine) -> None:
    done = threading.Event()
    for _ in range(2000):
        if sample(engine, "warmpath_kv_tier_pending_blocks") == 0:
            return
        done.wait(0.005)
    raise AssertionError("the disk queue did not empty")


def spill(engine: TorchEngine, ids: TokenArray, scope: PrefixScope = SCOPE) -> None:
    """Compute a prompt, then evict it with other prompts."""
    run_all(engine, [request("warm", ids, 1, scope=scope)])
    for i in range(4):
        run_all(engine, [request(f"churn{i}", prompt(300, 10 + i), 1)])
    settle(engine)


@pytest.mark.parametrize("kind", ["host", "disk", "both"])
def test_blocks_from_below_change_no_token(
    kind: str, tmp_path: Path, make_engine: MakeEngine, reference: Reference
) -> None:
    """Five prefixes alternate in a pool for two: every second round comes from the tiers, with equal tokens."""
    engine = make_engine(tiers=tiers(kind, tmp_path), **SMALL)
    prompts = {seed: prompt(150 + seed, seed) for seed in range(5)}
    for turn in range(3):
        for seed, ids in prompts.items():
            got = run_all(engine, [request(f"{turn}-{seed}", ids, 6)])
            settle(engine)
            assert got.tokens[f"{turn}-{seed}"] == reference("qwen3", ids, 6), (turn, seed)
            if turn:
                assert got.cached[f"{turn}-{seed}"] == (len(ids) - 1) // 16 * 16
    for tier in ("host", "disk") if kind == "both" else (kind,):
        assert sample(engine, "warmpath_kv_tier_hits_total", tier=tier) > 0
        assert sample(engine, "warmpath_kv_tier_load_seconds_count", tier=tier) > 0
    assert sum(sample(engine, "warmpath_kv_tier_hits_total", tier=tier) for tier in ("host", "disk")) >= 60
    assert sample(engine, "warmpath_prompt_tokens_computed_total") < 5 * 155 + 10 * 16


def test_a_restart_reuses_earlier_blocks(tmp_path: Path, make_engine: MakeEngine, reference: Reference) -> None:
    """A stopped engine leaves pool and host memory on disk; the next one announces and uses them."""
    ids = prompt(200)
    first = make_engine(tiers=tiers("both", tmp_path), **SMALL)
    run_all(first, [request("one", ids, 4)])
    first.stop()
    events: list[Event] = []
    second = make_engine(tiers=tiers("both", tmp_path), events=events, **SMALL)
    second.reset_prefix_cache(tiers=False)
    got = run_all(second, [request("two", ids, 4)])
    assert got.cached["two"] == 192
    assert got.tokens["two"] == reference("qwen3", ids, 4)
    told = [event.hashes for event in events if isinstance(event, BlocksStored) and event.tier == "disk"]
    assert len(set(split_chain(b"".join(told)))) == 12
    second.stop()
    other = make_engine(tiers=tiers("both", tmp_path), model_fingerprint="another", **SMALL)
    assert run_all(other, [request("three", ids, 4)]).cached["three"] == 0


def colliding(parent: bytes, token_ids: TokenArray, block_size: int) -> bytes:
    return b"".join(i.to_bytes(16, "little") for i in range(len(token_ids) // block_size))


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_collision_never_brings_up_a_foreign_block(kind: str, tmp_path: Path, make_simulated: MakeSimulated) -> None:
    """Every prompt's blocks have the same hashes: in the tiers, too, only the prefix digest counts."""
    runner = SimulatedRunner(CostModel(1e9, 0.0, 0.0, block_bytes=1024), EngineSettings())
    engine = make_simulated(runner, tiers=tiers(kind, tmp_path), hash_chain=colliding, **SMALL)
    run_all(engine, [request("a", prompt(300, 1), 1)])
    run_all(engine, [request("b", prompt(380, 2), 1)])
    settle(engine)
    assert engine.reset_prefix_cache(tiers=False), "the pool must hold no block"
    assert run_all(engine, [request("c", prompt(300, 3), 1)]).cached["c"] == 0
    other = np.concatenate([prompt(160, 3), prompt(300, 1)[160:]])
    assert run_all(engine, [request("d", other, 1)]).cached["d"] <= 160


def test_a_load_from_disk_keeps_nobody_else_waiting(
    tmp_path: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others run, a waiting request can be cancelled, and requests of one prefix share the load. (docs: caching)"""
    ids = prompt(150)
    engine = make_engine(tiers=tiers("disk", tmp_path), **SMALL)
    spill(engine, ids)
    gate, entered = threading.Event(), threading.Event()
    load = disk_tier.DiskTier.load

    def slow(self: Any, block_hash: bytes) -> Any:
        entered.set()
        assert gate.wait(30)
        return load(self, block_hash)

    monkeypatch.setattr(disk_tier.DiskTier, "load", slow)
    collector = Collector()
    for name in ("one", "two", "gone"):
        engine.submit(request(name, ids, 3), collector)
    assert entered.wait(10)
    assert run_all(engine, [request("other", prompt(40, 77), 4)]).finish["other"] == "length"
    engine.cancel("gone")
    collector.wait(["gone"])
    assert "one" not in collector.finish
    gate.set()
    collector.wait(["one", "two"])
    assert collector.cached == {"one": 144, "two": 144}
    assert collector.tokens["one"] == collector.tokens["two"]


def test_concurrent_loads_are_bounded(tmp_path: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With space for one load at a time the others wait for it, and are loaded all the same."""
    monkeypatch.setattr("serve_app.engine.kv.tier_loader.LOADING_BYTES", 1)
    engine = make_engine(tiers=tiers("disk", tmp_path), **SMALL)
    for seed in range(3):
        spill(engine, prompt(50, seed))
    got = run_all(engine, [request(f"r{seed}", prompt(50, seed), 3) for seed in range(3)])
    assert got.cached == dict.fromkeys(("r0", "r1", "r2"), 48)


def test_a_torn_file_is_computed_instead(tmp_path: Path, make_engine: MakeEngine, reference: Reference) -> None:
    """The blocks before it are used, the rest is computed, and the tokens are right."""
    ids = prompt(150)
    engine = make_engine(tiers=tiers("disk", tmp_path), **SMALL)
    spill(engine, ids)
    item = request("hit", ids, 5)
    chain = list(split_chain(engine.cache.prompt_chain(item.scope, item.root, item.token_ids)))
    victim = next(tmp_path.glob(f"slot-*/{chain[4].hex()}.kv"))
    data = bytearray(victim.read_bytes())
    data[-3] ^= 4
    victim.write_bytes(data)
    got = run_all(engine, [item])
    assert got.cached["hit"] == 64
    assert got.tokens["hit"] == reference("qwen3", ids, 5)
    assert not victim.exists()
    assert sample(engine, "warmpath_kv_tier_refused_files_total") == 1


def test_blocks_not_worth_a_load_are_computed(make_engine: MakeEngine) -> None:
    """A ratio of 0 never loads."""
    engine = make_engine(tiers=tier_settings(400 * BLOCK, tier_load_ratio=0.0), **SMALL)
    spill(engine, prompt(200))
    assert run_all(engine, [request("again", prompt(200), 1)]).cached["again"] == 0
    assert sample(engine, "warmpath_kv_tier_hits_total") == 0
    assert sample(engine, "warmpath_kv_tier_blocks", tier="host") > 30


def test_bounds_that_hold_no_block_and_a_missing_directory_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="host_cache_bytes"):
        make_engine(tiers=tier_settings(host=10))
    with pytest.raises(ValueError, match="disk_cache_dir"):
        make_engine(tiers=tier_settings(disk=1 << 20))


@pytest.mark.parametrize("first", [0, 3, 7])
def test_an_export_continues_in_host_memory(first: int, tmp_path: Path, make_engine: MakeEngine) -> None:
    """A prefix that was evicted from the pool in part or in full is exported whole, byte for byte."""
    engine = make_engine(tiers=tiers("host", tmp_path), **SMALL)
    plain = make_engine(**{**SMALL, "num_blocks": 256})
    ids = prompt(150)
    hashes = hash_blocks(SCOPE.root(SECRET), ids, 16)
    for one in (engine, plain):
        run_all(one, [request("a", ids, 1)])
    expected = plain.transfer.export_prefix(HashedTokens(SCOPE, ids, hashes), first)
    assert expected is not None
    for other in range(6):  # evicts the prompt from its end
        exported = engine.transfer.export_prefix(HashedTokens(SCOPE, ids, hashes), first)
        assert exported is not None
        assert exported.header == expected.header
        assert np.array_equal(exported.payload, expected.payload)
        run_all(engine, [request(f"other {other}", prompt(90, 20 + other), 1)])
    assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 0
    stranger = PrefixScope("tiny", salt=b"stranger")
    strangers = HashedTokens(stranger, ids, hash_blocks(stranger.root(SECRET), ids, 16))
    assert engine.transfer.export_prefix(strangers, first) is None
    assert engine.transfer.export_prefix(HashedTokens(stranger, ids, hashes), first) is None
