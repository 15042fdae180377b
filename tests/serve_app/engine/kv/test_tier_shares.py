"""Tenants' shares of the tiers, as requests see them: a flood takes nobody's blocks, and saves expire."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from router.protocol.block_hash import PrefixScope
from serve_app.cache.prefix.quota import PUBLIC
from serve_app.cache.tiers.tier_index import account_key
from serve_app.cache.tiers.tier_queue import TierQueue
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import EngineRequest
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from tests.harness.tiers import tier_settings
from tests.serve_app.engine.kv.test_prompt_pins import asking, run, saving
from tests.serve_app.engine.kv.test_tier_loader import settle
from tests.serve_app.engine.simulated import MakeSimulated
from tests.serve_app.engine.tiny import prompt, request, run_all, sample

BLOCK = 1024
FILE = 400
"""The approximate size of a simulated block's file, which has only a header."""


@pytest.fixture
def engine_over(tmp_path: Path, make_simulated: MakeSimulated) -> Callable[..., TorchEngine]:
    """Build a pool of 40 blocks over host memory and disk, two tenants, blocks of a kilobyte."""

    def make(host_blocks: int, disk_blocks: int, clock: Callable[[], float] = lambda: 0.0) -> TorchEngine:
        return make_simulated(
            SimulatedRunner(CostModel(1e9, 0.0, 0.0, block_bytes=BLOCK), EngineSettings()),
            num_blocks=40,
            max_num_seqs=4,
            pin_budget_blocks=12,
            tenant_shares={"flood": 1.0, "small": 1.0},
            tiers=tier_settings(host_blocks * BLOCK, disk_blocks * FILE, tmp_path, tier_load_ratio=1e9),
            clock=clock,
        )

    return make


def ask(engine: TorchEngine, tenant: str, seed: int, tokens: int = 150) -> int:
    """Ask for a prompt and return the number of its cached tokens; wait until the disk is written."""
    scope = PrefixScope("tiny", salt=tenant.encode())
    name = f"{tenant} {seed}"
    got = run_all(engine, [request(name, prompt(tokens, seed), 1, scope=scope, tenant=tenant)])
    if engine.tier_loader.tiers.keeping:
        settle(engine)
    return got.cached[name] or 0


def flood(engine: TorchEngine) -> None:
    """Ten prompts of eighteen blocks, far more than pool and tiers hold."""
    for seed in range(100, 110):
        ask(engine, "flood", seed, 300)


@pytest.mark.parametrize(("host", "disk"), [(40, 0), (0, 80), (10, 80)])
def test_a_flood_spares_a_tenant_within_its_share_of_the_tiers(
    host: int, disk: int, engine_over: MakeSimulated
) -> None:
    """Three prompts of nine blocks exceed a tenant's share of the pool, but not of a tier: all hit."""
    engine = engine_over(host, disk)
    for seed in range(3):
        ask(engine, "small", seed)
    flood(engine)
    assert [ask(engine, "small", seed) for seed in range(3)] == [144, 144, 144]


def saved_on_disk(engine: TorchEngine) -> int:
    (disk,) = engine.tier_loader.tiers.keeping
    assert isinstance(disk, TierQueue)
    settle(engine)
    done = threading.Event()
    disk._enqueue(done.set)
    assert done.wait(10)
    return sum(entry.saved_until_s is not None for entry in engine.tier_loader.tiers.indexes["disk"])


def save(engine: TorchEngine, tenant: str, ttl_s: float | None = None, number: int = 1) -> str | None:
    scope = PrefixScope("tiny", salt=f"{tenant} {number}".encode())
    item: EngineRequest = saving(f"{tenant} {number}", 1, key=scope.salt, ttl_s=ttl_s, scope=scope, tenant=tenant)
    return run(engine, item).saves[item.request_id]


@pytest.mark.parametrize("ending", ["reset", "recall", "ttl"])
def test_blocks_on_disk_are_saved_as_long_as_their_save_is(ending: str, engine_over: MakeSimulated) -> None:
    """The save ends with a reset, a recall for another tenant's share of the pins, or its TTL. (docs: caching)"""
    now_s = [0.0]
    engine = engine_over(0, 80, lambda: now_s[0])
    assert save(engine, "flood", 300.0 if ending == "ttl" else None) == "saved"
    assert save(engine, "flood", 900.0, number=2) == "saved"
    assert saved_on_disk(engine) == 12
    if ending == "reset":
        engine.reset_prefix_cache(tiers=False)
    elif ending == "recall":
        assert save(engine, "small") == "saved"
        assert [save(engine, tenant, number=3) for tenant in ("flood", "small")] == ["over_budget", "over_budget"]
        assert sample(engine, "warmpath_pins_recalled_total") == 1
    else:
        now_s[0] = 301.0
        run(engine, asking("later", 9))
    assert saved_on_disk(engine) == {"reset": 0, "recall": 12, "ttl": 6}[ending]


def test_saves_go_to_disk_with_their_remaining_time(engine_over: MakeSimulated, tmp_path: Path) -> None:
    """A restart keeps an active save's blocks saved, and each file's name has the save's end."""
    now_s = [0.0]
    engine = engine_over(0, 80, lambda: now_s[0])
    assert save(engine, "flood", 300.0) == "saved"
    assert save(engine, "small") == "saved"
    engine.stop()
    engine = engine_over(0, 80)
    assert saved_on_disk(engine) == 12
    names = [file.name.split(".") for file in tmp_path.glob("slot-*/*.saved")]
    ends_s = [int(name[1]) for name in names if len(name) == 3]
    assert (len(names), len(ends_s)) == (12, 6)
    assert all(200 < end_s - time.time() <= 300 for end_s in ends_s)
    scope = PrefixScope("tiny", salt=b"small 1")
    assert run(engine, asking("again", 2, scope=scope, tenant="small")).cached["again"] == 96


def test_files_name_no_tenant(engine_over: MakeSimulated, tmp_path: Path) -> None:
    engine = engine_over(0, 80)
    ask(engine, "small", 1)
    engine.stop()
    files = list(tmp_path.glob("slot-*/*.kv"))
    assert len(files) == 9
    assert not any(b"small" in file.read_bytes() or "small" in file.name for file in files)


def test_requests_served_from_the_pool_keep_a_tenants_share_below_it(engine_over: MakeSimulated) -> None:
    """The pool's requests are reported to the tiers, which then count the tenant as active."""
    now_s = [0.0]
    engine = engine_over(40, 0, lambda: now_s[0])
    for seed in range(3):
        ask(engine, "small", seed)
    for _ in range(5):
        now_s[0] += 400.0
        ask(engine, "small", 2)
    flood(engine)
    assert ask(engine, "small", 0) == 144


def test_public_blocks_below_the_pool_are_on_their_own_account(engine_over: MakeSimulated) -> None:
    """They are not on the account of the tenant that computed them, on disk and after a restart."""
    engine = engine_over(0, 80)
    scope = PrefixScope("tiny", salt=b"flood", public_blocks=6)
    run_all(engine, [request("public", prompt(150), 1, scope=scope, tenant="flood")])
    engine.stop()
    engine = engine_over(0, 80)
    index = engine.tier_loader.tiers.indexes["disk"]
    assert index.holdings() == {
        account_key(tenant): sum(entry.size for entry in index if entry.block.owner == account_key(tenant))
        for tenant in (PUBLIC, "flood")
    }
    assert sum(1 for entry in index if entry.block.owner == account_key(PUBLIC)) == 6
