"""The tiers below vLLM's pool, over a model of the pool: what was stored comes back, and never in another scope."""

import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from router.protocol.block_hash import HASH_BYTES, PrefixScope, extend_chain, split_chain
from router.vllm_events.batches import KvEventBatch
from router.vllm_events.pool import FollowedPool
from serve_app.cache.kv_chain import KvChain, KvFormat, KvPart, make_header, verify_part
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.cache.prefix.pins import Pins
from serve_app.config.cache import CacheSection
from serve_app.engine.protocol import EngineError, EngineRequest
from serve_app.engine.reports import EngineMeters
from serve_app.engine.vllm import tier_loader, tier_writer
from serve_app.engine.vllm.frontend import ModelFacts
from serve_app.engine.vllm.settings import VllmSettings
from serve_app.engine.vllm.tiers import VllmTiers
from serve_app.engine.vllm.transfer.migration import VllmMigration
from tests.harness.eventually import eventually
from tests.harness.tiers import tier_settings
from tests.router.vllm_events.pool_model import PoolModel, Request, Routers
from tests.serve_app.engine.tiny import VOCAB, request, root_of

SIZE, ROW = 2, 24
SCOPES = [
    PrefixScope("m", salt=b"a"),
    PrefixScope("m", salt=b"b"),
    PrefixScope("m", "x@1", b"a"),
    PrefixScope("m", salt=b"a", public_blocks=2),
    PrefixScope("m", salt=b"b", public_blocks=2),
]


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """No limit of time ends a copy because the machine is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_loader, "UNKNOWN_DEADLINE_S", 600.0)
        for name in ("SAVE_S", "ROOM_S", "CLOSE_S"):
            patch.setattr(tier_writer, name, 600.0)
        yield


def row_of(scope: PrefixScope, ids: Sequence[int], index: int) -> bytes:
    """The naive oracle: the KV of a prompt's block depends on its own scope and all tokens so far, on nothing else."""
    own = scope.at(index)
    return blake2b(repr((own.lora, own.salt, list(ids[: SIZE * (index + 1)]))).encode(), digest_size=ROW).digest()


class Moves(VllmMigration):
    """Copies in steps of the model, without files."""

    core: "Core"

    def export_prefix(
        self, prefix: HashedTokens, first: int = 0, most_blocks: int | None = None, **_: Any
    ) -> KvChain | None:
        end = self.pool.count_held(prefix.chain, first + (most_blocks or 0))
        root = self.pool.roots_of(prefix.chain, prefix.scope.public_blocks)
        if end <= first or extend_chain(root, prefix.scope.public_blocks, prefix.token_ids, SIZE) != prefix.chain:
            return None
        held = self.core.step(root, prefix.scope, [*prefix.token_ids[: end * SIZE].tolist(), 0], {})
        rows = [held[index] for index in range(first, end) if index in held]
        if not rows:
            return None
        payload, end = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, ROW), first + len(rows)
        ids, chain = prefix.token_ids[: end * SIZE], prefix.chain[: end * HASH_BYTES]
        assert self.kv_format is not None
        return KvChain(make_header(self.kv_format, prefix.scope, ids, chain, payload, first), payload)

    def import_part(self, part: KvChain, prefix: HashedTokens, first: int) -> int:
        assert self.kv_format is not None
        verify_part(part, self.kv_format, prefix.scope, prefix.token_ids, prefix.chain, first)
        rows = {first + index: row.tobytes() for index, row in enumerate(part.payload)}
        ids = [*prefix.token_ids[: (max(rows) + 1) * SIZE].tolist(), 0]
        return len(self.core.step(part.header.root, prefix.scope, ids, rows))


@dataclass
class Core:
    """A vLLM: the model of its pool, with the KV of each block, and the engine's parts around it."""

    directory: Path
    cache: CacheSection
    num_blocks: int = 14
    kv: dict[int, bytes] = field(default_factory=dict)
    routers: Routers = field(default_factory=Routers)

    def __post_init__(self) -> None:
        self.model, self.pool = PoolModel(self.num_blocks, SIZE), FollowedPool(SIZE, self.num_blocks)
        self.lock, self.pins = threading.RLock(), Pins(8)
        own = VllmSettings("m", block_size=SIZE, tiers=self.cache)
        facts = ModelFacts(VOCAB, 1000, self.num_blocks, SIZE, ((SIZE, self.num_blocks),))
        self.transfer = Moves(
            own, facts, self.pool, self.pins, self.directory, lambda *_: 0, lambda: 0.0, lambda *_: None
        )
        self.transfer.core, self.transfer._format = self, KvFormat("m/vllm", SIZE, (KvPart("uint8", (ROW,)),))
        self.tiers = VllmTiers(
            own, self.num_blocks, self.pool, self.transfer, EngineMeters(), self.pins, lambda: False, self.routers
        )
        self.tiers.start()

    def step(self, root: bytes, scope: PrefixScope, ids: Sequence[int], rows: dict[int, bytes]) -> dict[int, bytes]:
        """Compute a prompt, with ``rows`` by index if all before them are held; return the KV of the held blocks."""
        with self.lock:
            asked = self.model.begin(root, scope.lora or None, list(ids), len(ids), scope.public_blocks)
            if asked is None:
                raise EngineError("no space")
            held = {index: self.kv[block] for index, block in enumerate(asked.blocks[: asked.hits])}
            for index in range(asked.hits, len(ids) // SIZE):
                loads = index in rows and asked.hits >= min(rows)
                row = rows[index] if loads else row_of(scope, ids, index)
                self.kv[asked.blocks[index]] = row
                if loads:
                    held[index] = row
            self.model.end(asked)
            self.tell()
            return held

    def serve(self, asked: EngineRequest) -> int:
        """Compute a request as the engine does; check the KV that it reads, and return how many blocks were cached."""
        scope, ids = asked.scope, asked.token_ids.tolist()
        chain = extend_chain(asked.root, scope.public_blocks, asked.token_ids, SIZE)
        asked = structs.replace(asked, block_hashes=chain)
        self.tiers.note(asked)
        if asked.store_kv:
            self.transfer.note_owner(asked.root, scope, asked.tenant)
        if (load := self.tiers.loader.begin(asked)) is not None:
            load.ended.result(60)
            self.tiers.loader.leave(load)
        with self.lock:
            if asked.store_kv:
                held = self.step(asked.root, scope, ids, {})
            else:
                alone = Request(asked.root, scope.lora or None, ids, public=scope.public_blocks)
                blocks = self.model.match(alone, (len(ids) - 1) // SIZE)
                held = {index: self.kv[block] for index, block in enumerate(blocks)}
        for index, row in held.items():
            assert row == row_of(scope, ids, index), "a request reads another's KV"
        self.tiers.used(asked, len(held))
        return len(held)

    def tell(self) -> None:
        self.tiers.hear(self.pool.translate(KvEventBatch(1.0, self.model.take_events())))

    def settle(self) -> None:
        """Wait until all that is known is written, and told."""
        tiers = self.tiers.tiers
        eventually(lambda: self.tiers.writer.idle and not any(tier.pending_blocks for tier in tiers.keeping))  # type: ignore[attr-defined]
        self.tiers.hear(())

    def told(self) -> dict[str, set[bytes]]:
        """The blocks that routers know, by tier."""
        return {tier: set(split_chain(told)) for tier, told in self.routers.mirror.tiers().items()}


def below(directory: Path, disk: bool, store: bool, blocks: int = 1000) -> CacheSection:
    """Tiers that are always worth a load; a block's file has about 400 bytes."""
    others = {"object_cache_url": f"file://{directory}/store", "object_cache_bytes": 1 << 30} if store else {}
    return tier_settings(
        0, 400 * blocks * disk, directory / "disk", tier_load_ratio=1e9, disk_queue_bytes=64 * ROW, **others
    )


def asking(number: int, scope: PrefixScope, ids: Sequence[int], *, store_kv: bool = True) -> EngineRequest:
    tenant = scope.salt.decode()
    return structs.replace(request(f"r{number}", ids, scope=scope, tenant=tenant), store_kv=store_kv)


Prompts = st.lists(st.integers(0, 1), min_size=1, max_size=22)
Asked = st.tuples(st.sampled_from(SCOPES), Prompts, st.sampled_from([True, True, True, False]))


@settings(max_examples=60)
@given(st.lists(Asked, max_size=16), st.sampled_from([(True, False), (False, True), (True, True)]), st.randoms())
def test_all_that_was_stored_comes_back_to_its_scope(
    asked: list[tuple[PrefixScope, list[int], bool]], kinds: tuple[bool, bool], rng: random.Random
) -> None:
    """In tiers that hold everything, across restarts: the naive oracle is the set of all blocks that were stored.

    Each block's KV is compared with what its own scope and tokens make of it.
    """
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        core, stored = Core(where, below(where, *kinds)), set[tuple[PrefixScope, str, tuple[int, ...]]]()
        for number, (scope, ids, store_kv) in enumerate(asked):
            names = [(scope.at(at), scope.lora, tuple(ids[: SIZE * (at + 1)])) for at in range(len(ids) // SIZE)]
            usable = names[: (len(ids) - 1) // SIZE]
            known = next((at for at, name in enumerate(usable) if name not in stored), len(usable))
            assert core.serve(asking(number, scope, ids, store_kv=store_kv)) >= known
            stored |= set(names) if store_kv else set()
            core.settle()
            if rng.random() < 0.1:
                core.tiers.close()
                core = Core(where, below(where, *kinds))
        if kinds[0]:
            held = {
                block
                for tier in core.tiers.tiers.tiers
                if tier.index
                for block in (e.block.block_hash for e in tier.index)
            }
            assert core.told().get("disk", set()) == held
        core.tiers.close()


def harm(directory: Path, rng: random.Random) -> None:
    """Alter, cut, exchange or remove a file of a tier."""
    files = sorted([*directory.glob("disk/slot-*/*.kv"), *directory.glob("store/*/*/*.kv")])
    if not files:
        return
    victim, content = rng.choice(files), rng.choice(files).read_bytes()
    how = rng.choice(["altered", "cut", "exchanged", "gone"])
    if how == "gone":
        victim.unlink()
    else:
        own = victim.read_bytes()
        at = rng.randrange(len(own))
        changed = own[:at] + bytes([own[at] ^ 1]) + own[at + 1 :]
        victim.write_bytes({"altered": changed, "cut": own[:at], "exchanged": content}[how])


def test_while_requests_run_a_growing_answers_blocks_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy is a job in a step. Once nothing runs, the rest goes at once; a saved prompt never waits."""
    monkeypatch.setattr(tier_writer, "QUIET_S", 1e6)
    core, running = Core(tmp_path, below(tmp_path, disk=True, store=False), num_blocks=400), True
    core.tiers.writer.busy = lambda: running
    disk, ids = core.tiers.tiers.tiers[0], [number % 2 for number in range(40)]
    for number in range(1, tier_writer.TOGETHER):
        core.serve(asking(number, SCOPES[0], ids[: SIZE * number]))
        assert not core.tiers.writer.idle and not disk.index
    core.serve(asking(0, SCOPES[0], ids[: SIZE * tier_writer.TOGETHER]))
    core.settle()
    assert len(disk.index or ()) == tier_writer.TOGETHER
    core.serve(asking(20, SCOPES[1], ids[:6]))
    core.tiers.saved(extend_chain(root_of(SCOPES[1]), 0, np.array(ids[:6], np.int32), SIZE), 60.0)
    eventually(lambda: len(disk.index or ()) == tier_writer.TOGETHER + 3)
    core.serve(asking(30, SCOPES[2], ids[:4]))
    assert not core.tiers.writer.idle
    running = False
    core.tiers.rest()
    core.settle()
    assert len(disk.index or ()) == tier_writer.TOGETHER + 5
    core.tiers.close()
    assert len([*tmp_path.glob("disk/slot-0/*.saved")]) == 3


SEQUENCES = 300


def test_no_block_is_read_across_scopes(tmp_path: Path) -> None:
    """Small tiers, two engines in turn over one store, resets, restarts, and files that were harmed meanwhile."""
    rng = random.Random(1)
    cores = [Core(tmp_path / name, below(tmp_path, disk=True, store=True, blocks=40)) for name in "ab"]
    loaded, cached = 0.0, 0
    for number in range(SEQUENCES):
        scope, ids = rng.choice(SCOPES), [rng.randrange(2) for _ in range(rng.randrange(1, 23))]
        which = rng.randrange(2)
        cached += cores[which].serve(asking(number, scope, ids, store_kv=rng.random() < 0.8))
        action = rng.random()
        if action < 0.3:
            cores[which].settle()
        elif action < 0.35:
            with suppress(FileNotFoundError):  # it was evicted just now
                harm(tmp_path, rng)
        elif action < 0.37:
            loaded += cores[which].tiers.loaded[0]
            cores[which].tiers.close()
            cores[which] = Core(tmp_path / "ab"[which], below(tmp_path, disk=True, store=True, blocks=40))
        elif action < 0.38:
            cores[which].tiers.reset(tiers=rng.random() < 0.5)
            with cores[which].lock:
                cores[which].model.reset()
                cores[which].tell()
    loaded += sum(core.tiers.loaded[0] for core in cores)
    for core in cores:
        core.tiers.close()
    assert loaded > SEQUENCES / 10 and cached > loaded
