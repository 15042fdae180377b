"""Blocks in a store that engines share: they change no token, only their owners can read them, and no fault stops."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from msgspec.structs import replace

from router.protocol.block_hash import PrefixScope
from router.protocol.events import BlocksStored, Event
from serve_app.cache.tiers import object as object_tier
from serve_app.config.cache import CacheSection
from serve_app.engine.protocol import EngineRequest
from tests.harness.tiers import tier_settings
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.kv.test_prompt_pins import saving
from tests.serve_app.engine.kv.test_tier_loader import BLOCK, SMALL, settle, spill
from tests.serve_app.engine.tiny import SECRET, prompt, request, run_all, sample

IDS = prompt(200)
FOLDER = object_tier.FOLDER


def tiers(url: str, directory: Path | None = None, most_bytes: int = 1 << 30, **others: Any) -> CacheSection:
    return tier_settings(
        directory=directory,
        tier_load_ratio=1e9,
        object_cache_url=url,
        object_cache_bytes=most_bytes,
        **others,
    )


class FaultyStore(MemoryFileSystem):  # type: ignore[misc]
    """A store in memory that fails, or hangs, on demand."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    fault: Callable[[], None] = staticmethod(lambda: None)
    calls = 0

    def cat_file(self, *args: Any, **named: Any) -> Any:
        self._meet()
        return super().cat_file(*args, **named)

    def pipe_file(self, *args: Any, **named: Any) -> Any:
        self._meet()
        return super().pipe_file(*args, **named)

    def rm_file(self, *args: Any, **named: Any) -> Any:
        self._meet()
        return super().rm_file(*args, **named)

    def _meet(self) -> None:
        type(self).calls += 1
        type(self).fault()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FaultyStore]]:
    register_implementation("faulty", FaultyStore, clobber=True)
    monkeypatch.setattr(object_tier, "CALL_S", 0.2)
    FaultyStore.store.clear()
    FaultyStore.fault, FaultyStore.calls = staticmethod(lambda: None), 0
    yield FaultyStore
    FaultyStore.fault = staticmethod(lambda: None)


def objects(directory: Path) -> list[Path]:
    return sorted((directory / FOLDER).glob("*/*.kv"))


def asking(name: str, secret: bytes, scope: PrefixScope) -> EngineRequest:
    return replace(request(name, IDS, 5, scope=scope), root=scope.root(secret))


@pytest.mark.parametrize("above", [{}, {"host": 20 * BLOCK, "disk": 30 * BLOCK}])
def test_a_second_engine_uses_what_the_first_computed(
    above: dict[str, int], tmp_path: Path, make_engine: MakeEngine, reference: Reference
) -> None:
    """It was evicted from the first one, down to the store; the second, which began before, has the same tokens.

    docs: caching
    """
    url, events = f"file://{tmp_path}/store", list[Event]()
    first = make_engine(tiers=tiers(url, tmp_path / "disk", **above), **SMALL)
    second = make_engine(tiers=tiers(url, tmp_path / "disk", **above), events=events, **SMALL)
    for seed in (0, 1) if above else (0,):
        spill(first, prompt(200, seed))
    got = run_all(second, [request("two", IDS, 5)])
    assert got.cached["two"] == 192
    assert got.tokens["two"] == reference("qwen3", IDS, 5)
    assert sample(second, "warmpath_kv_tier_hits_total", tier="object") == 12
    assert sample(second, "warmpath_kv_tier_load_seconds_count", tier="object") > 0
    assert {event.tier for event in events if isinstance(event, BlocksStored)} == {"pool"}


def test_a_restart_finds_the_pool_in_the_store(tmp_path: Path, make_engine: MakeEngine, reference: Reference) -> None:
    """Of the same model; another model, with the same hashes, finds nothing."""
    below = tiers(f"file://{tmp_path}")
    first = make_engine(tiers=below, **SMALL)
    run_all(first, [request("one", IDS, 1)])
    first.stop()
    assert len(objects(tmp_path)) == 12
    second = make_engine(tiers=below, **SMALL)
    got = run_all(second, [request("two", IDS, 5)])
    assert (got.cached["two"], got.tokens["two"]) == (192, reference("qwen3", IDS, 5))
    other = make_engine(tiers=below, model_fingerprint="another", **SMALL)
    assert run_all(other, [request("three", IDS, 5)]).cached["three"] == 0
    assert sample(other, "warmpath_kv_tier_refused_files_total") == 0


def test_only_the_same_tenant_and_deployment_can_read_a_block(tmp_path: Path, make_engine: MakeEngine) -> None:
    """Neither names nor contents tell tokens or tenants, and an object under another's name is refused."""
    below = tiers(f"file://{tmp_path}")
    mine, theirs = PrefixScope("tiny", salt=b"acme"), PrefixScope("tiny", salt=b"zeta")

    def cached(secret: bytes, scope: PrefixScope) -> int | None:
        engine = make_engine(tiers=below, **SMALL)
        found = run_all(engine, [asking("q", secret, scope)]).cached["q"]
        assert sample(engine, "warmpath_kv_tier_refused_files_total") == 0
        engine.stop()
        return found

    assert cached(b"secret" * 4, mine) == 0
    names = {path.name for path in objects(tmp_path)}
    assert len(names) == 12
    own = {path.name: path.read_bytes() for path in objects(tmp_path)}
    assert not any(word in content for content in own.values() for word in (IDS[:16].tobytes(), b"acme"))
    assert cached(b"another" * 4, mine) == cached(b"secret" * 4, theirs) == 0
    assert cached(b"secret" * 4, mine) == 192
    rest = [path for path in objects(tmp_path) if path.name not in names]
    assert len(rest) == 24
    for path, content in zip(rest, [*own.values(), *own.values()], strict=True):
        path.write_bytes(content)
    engine = make_engine(tiers=below, **SMALL)
    assert run_all(engine, [asking("q", b"secret" * 4, theirs)]).cached["q"] == 0
    assert sample(engine, "warmpath_kv_tier_refused_files_total", tier="object") == 1


@pytest.mark.parametrize("harm", ["altered", "cut", "empty", "gone"])
def test_a_harmed_object_is_a_miss(harm: str, tmp_path: Path, make_engine: MakeEngine, reference: Reference) -> None:
    """Blocks before it are used, and it is written again."""
    below = tiers(f"file://{tmp_path}")
    first = make_engine(tiers=below, **SMALL)
    run_all(first, [request("one", IDS, 1)])
    first.stop()
    victim = objects(tmp_path)[5]
    content = victim.read_bytes()
    changed = {"altered": content[:-1] + bytes([content[-1] ^ 1]), "cut": content[:99], "empty": b"", "gone": None}[
        harm
    ]
    victim.unlink() if changed is None else victim.write_bytes(changed)
    second = make_engine(tiers=below, **SMALL)
    got = run_all(second, [request("two", IDS, 5)])
    assert got.tokens["two"] == reference("qwen3", IDS, 5)
    assert got.cached["two"] in range(0, 192, 16)
    assert sample(second, "warmpath_kv_tier_refused_files_total") == (harm != "gone")
    assert sample(second, "warmpath_kv_tier_failures_total") == 0
    second.stop()
    third = make_engine(tiers=below, **SMALL)
    assert run_all(third, [request("three", IDS, 5)]).cached["three"] == 192


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_a_faulty_store_costs_a_moment_and_no_answer(
    fault: str, faulty: type[FaultyStore], make_engine: MakeEngine, reference: Reference
) -> None:
    """Others run while one request waits for it; then that is computed, and the store is left alone for a while."""
    below, gate, entered = tiers("faulty://kv"), threading.Event(), threading.Event()
    spill(make_engine(tiers=below, **SMALL), IDS)
    engine = make_engine(tiers=below, **SMALL)

    def meet() -> None:
        entered.set()
        if fault == "fails":
            raise OSError("the store fails")
        assert gate.wait(60)

    faulty.fault = staticmethod(meet)
    got = run_all(engine, [request("two", IDS, 5), request("short", prompt(9, 9), 3)])
    assert entered.is_set()
    assert (got.cached["two"], got.tokens["two"]) == (0, reference("qwen3", IDS, 5))
    assert sample(engine, "warmpath_kv_tier_failures_total", tier="object") >= 1
    calls = faulty.calls
    spill(engine, prompt(150, 7))
    assert faulty.calls == calls, "it pauses, and drops what it would write"
    assert sample(engine, "warmpath_kv_tier_drops_total", tier="object") > 0
    assert engine.healthy()
    engine.stop()
    gate.set()


def test_the_bound_holds_and_the_oldest_blocks_go_first(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(tiers=tiers(f"file://{tmp_path}", most_bytes=40 * BLOCK), **SMALL)
    for seed in range(6):
        spill(engine, prompt(200, seed))
    pause = threading.Event()
    for _ in range(2000):  # the last sweep may still run
        used = sum(path.stat().st_size for path in objects(tmp_path))
        if used <= 44 * BLOCK:
            break
        pause.wait(0.005)
    assert 30 * BLOCK < used <= 44 * BLOCK, "by a sixteenth more, until the next sweep"
    assert sample(engine, "warmpath_kv_tier_evicted_blocks_total", tier="object") > 0
    engine.reset_prefix_cache(tiers=False)
    assert run_all(engine, [request("old", prompt(200, 0), 1)]).cached["old"] == 0


def test_what_is_written_beside_a_sweep_is_swept_after_it(
    tmp_path: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's own sweep ends at once, as one is running; there may be no later writer."""
    sweeper, again, listing = list[int](), threading.Event(), object_tier.ObjectStore._listing

    def listed(tier: object_tier.ObjectStore) -> Any:
        if not sweeper:
            sweeper.append(threading.get_ident())
            tier._written_bytes = tier._capacity_bytes
            tier._sweep()
        elif sweeper[0] == threading.get_ident():
            again.set()
        return listing(tier)

    monkeypatch.setattr(object_tier.ObjectStore, "_listing", listed)
    spill(make_engine(tiers=tiers(f"file://{tmp_path}", most_bytes=40 * BLOCK), **SMALL), prompt(200, 0))
    assert again.wait(60)


def test_a_reset_removes_every_block_and_nothing_is_read_before(
    faulty: type[FaultyStore], make_engine: MakeEngine
) -> None:
    """If the store fails meanwhile, the blocks stay unused until they are gone. (docs: caching)"""
    engine = make_engine(tiers=tiers("faulty://kv"), **SMALL)
    spill(engine, IDS)
    others = FaultyStore()
    others.pipe_file("/kv/other", b"of somebody else")
    broken = threading.Event()

    def meet() -> None:
        broken.set()
        raise OSError("the store fails")

    faulty.fault = staticmethod(meet)
    engine.reset_prefix_cache()
    assert broken.wait(60)
    assert run_all(engine, [request("again", IDS, 1)]).cached["again"] == 0
    faulty.fault = staticmethod(lambda: None)
    pause = threading.Event()
    for _ in range(2000):
        if not others.find(f"/kv/{FOLDER}"):
            break
        pause.wait(0.01)
    assert others.find("/kv") == ["/kv/other"]


def test_a_request_that_stores_nothing_leaves_no_object(tmp_path: Path, make_engine: MakeEngine) -> None:
    """Neither when its blocks go, nor at the end of the process. (docs: caching)"""
    engine = make_engine(tiers=tiers(f"file://{tmp_path}"), **SMALL)
    run_all(engine, [replace(request("private", IDS, 20), store_kv=False)])
    settle(engine)
    engine.stop()
    assert objects(tmp_path) == []


def test_public_blocks_are_every_tenants_and_no_others(tmp_path: Path, make_engine: MakeEngine) -> None:
    """A second engine gives another tenant the public part that the first one computed. (docs: caching)"""
    below = tiers(f"file://{tmp_path}")

    def asking(name: str, tenant: bytes, root: bytes) -> EngineRequest:
        scope = PrefixScope("tiny", salt=tenant, public_blocks=6)
        return replace(request(name, IDS, 5, scope=scope), root=scope.public.root(root) + scope.private.root(root))

    first = make_engine(tiers=below, **SMALL)
    one = run_all(first, [asking("one", b"acme", SECRET)])
    first.stop()
    second = make_engine(tiers=below, **SMALL)
    two = run_all(second, [asking("two", b"zeta", SECRET)])
    assert (two.cached["two"], two.tokens["two"]) == (96, one.tokens["one"])
    assert run_all(second, [asking("three", b"acme", SECRET)]).cached["three"] == 192
    third = make_engine(tiers=below, **SMALL)
    assert run_all(third, [asking("four", b"zeta", b"another" * 4)]).cached["four"] == 0


def test_a_saved_prompt_is_written_at_once(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(tiers=tiers(f"file://{tmp_path}"), **{**SMALL, "num_blocks": 64}, pin_budget_blocks=30)
    run_all(engine, [saving("s", 1)])
    settle(engine)
    assert objects(tmp_path)


@pytest.mark.parametrize(("url", "told"), [("s3://bucket/kv", "s3fs"), ("gs://bucket", "gcsfs"), ("nope://x", "nope")])
def test_a_store_that_cannot_be_used_here_is_refused_with_the_remedy(
    url: str, told: str, make_engine: MakeEngine
) -> None:
    with pytest.raises(ValueError, match=f"object_cache_url={url}: .*{told}"):
        make_engine(tiers=tiers(url))
