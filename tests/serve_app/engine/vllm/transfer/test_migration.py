"""vLLM's engine reports its pool to peers, exports and imports: over torch tensors for a pool, without vLLM."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import PrefixScope, extend_chain, split_chain
from router.vllm_events.pool import FollowedPool
from serve_app.cache.kv_chain import KvChain, KvPart, TransferError
from serve_app.cache.prefix.hot_prefixes import HashedTokens, SavedPrefix
from serve_app.cache.prefix.pins import Pins
from serve_app.engine.vllm.frontend import ModelFacts
from serve_app.engine.vllm.saves import block_number
from serve_app.engine.vllm.settings import VllmSettings
from serve_app.engine.vllm.transfer.job import LAYOUT_FILE, BlockRows, TransferJob, rank_file
from serve_app.engine.vllm.transfer.migration import VllmMigration
from tests.router.vllm_events.pool_model import hold
from tests.serve_app.engine.tiny import VOCAB, prompt, root_of

SIZE, BLOCKS = 2, 12
SCOPE, OTHER, ADAPTER = PrefixScope("m"), PrefixScope("m", salt=b"other"), PrefixScope("m", "x@1")

Prompts = st.lists(
    st.tuples(
        st.sampled_from([SCOPE, OTHER, ADAPTER]), st.lists(st.integers(0, 1), min_size=1, max_size=9), st.booleans()
    ),
    max_size=8,
)


def layers(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Three layers' KV, blocks first: the second is not contiguous, as some kernels want it, the last a drafter's."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.rand(BLOCKS, 3, SIZE, heads, generator=generator).to(dtype) for heads in (2, 2, 1)]
    return {"a": made[0], "b": made[1].transpose(2, 3).contiguous().transpose(2, 3), "draft": made[2]}


def prefix_of(scope: PrefixScope, ids: np.ndarray | list[int]) -> HashedTokens:
    ids = np.array(ids, np.int32)
    return HashedTokens(scope, ids, extend_chain(root_of(scope), 0, ids, SIZE), "t")


class Pool:
    """A vLLM of three ranks that runs jobs, and the known blocks; ``now_s`` advances 1 s per prompt."""

    def __init__(self, directory: Path | None = None) -> None:
        self.now_s = self.kv_usage = 0.0
        self.rows = BlockRows(layers(torch.float32))
        self.ranks = [BlockRows({name: layer}) for name, layer in layers(torch.float32).items()]
        if directory is not None:
            directory.mkdir()
            for rank, own in enumerate(self.ranks):
                part = KvPart("uint8", (own.block_bytes,), axes=f"vllm 0.32.0 on AVX2: {own.layout}")
                Path(rank_file(str(directory / LAYOUT_FILE), rank)).write_bytes(msgspec.json.encode(part))
        self.directory = directory or Path("/none")
        self.held, self.pins, self.jobs = FollowedPool(SIZE, 100, lambda: self.now_s), Pins(BLOCKS), list[TransferJob]()
        self.migration = self.make(copies=directory is not None)

    def make(self, *, copies: bool) -> VllmMigration:
        settings, facts = (
            VllmSettings("m", block_size=SIZE, copies=copies, pipeline_parallel_size=3),
            ModelFacts(VOCAB, 1000, BLOCKS, SIZE, ((SIZE, BLOCKS),)),
        )
        return VllmMigration(
            settings, facts, self.held, self.pins, self.directory, self.run,
            lambda: self.kv_usage, lambda saved, prefix: None, lambda: self.now_s,
        )  # fmt: skip

    def compute(self, prefix: HashedTokens, *, owned: bool = True) -> None:
        self.now_s += 1
        self.held.hit(prefix.chain, (len(prefix.token_ids) - 1) // SIZE)
        if owned:
            self.migration.note_owner(root_of(prefix.scope), prefix.scope, prefix.tenant)
        hold(self.held, root_of(prefix.scope), prefix.token_ids, SIZE)

    def run(self, job: TransferJob, token_ids: Sequence[int], root: bytes, lora: str) -> int:
        self.jobs.append(job)
        assert len(token_ids) == job.end * SIZE + 1
        ids = np.array(token_ids, np.int32)
        held = self.held.count_held(extend_chain(root, 0, ids, SIZE), job.end)
        chain = split_chain(hold(self.held, root, ids, SIZE))
        numbers = {block_hash: number for number, block_hash in enumerate(self.held)}
        blocks = [numbers[block_hash] for block_hash in chain]
        for rank, own in enumerate(self.ranks):
            if job.kind == "export":
                own.read(blocks[job.first : held]).tofile(rank_file(job.file, rank))
            else:
                rows = np.fromfile(rank_file(job.file, rank), np.uint8).reshape(-1, own.block_bytes)
                own.write(blocks[job.first :], rows)
        return held * SIZE


@given(Prompts)
def test_offered_blocks_are_the_held_ones_parents_first(
    prompts: list[tuple[PrefixScope, list[int], bool]],
) -> None:
    """Each prefix has its own tokens and scope; blocks of adapters, or of an unknown root, are not offered."""
    pool, wanted = Pool(), set()
    owned = {scope for scope, _, known in prompts if known and scope is not ADAPTER}
    for scope, tokens, known in prompts:
        prefix = prefix_of(scope, tokens)
        pool.compute(prefix, owned=known)
        wanted |= set(split_chain(prefix.chain)) if scope in owned else set()
    hot = pool.migration.hot_prefixes()
    told = [block_hash for run in hot.runs for block_hash in split_chain(run.hashes)]
    assert sorted(told) == sorted(wanted)
    for number, run in enumerate(hot.runs):
        prefix = hot.prefix(number)
        assert prefix.chain == prefix_of(prefix.scope, prefix.token_ids).chain
        assert prefix.tenant == "t"
        assert run.parent is None or run.parent < number


def test_saves_come_first_and_then_used_prefixes() -> None:
    """This includes rarely used saves, but only whole ones. Repeated requests make a prefix hotter."""
    pool, saved = Pool(), prefix_of(SCOPE, [1, 1, 1, 1])
    for tokens in ([1, 1, 1, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [1, 0, 1, 0, 1]):
        pool.compute(prefix_of(SCOPE, tokens))
    numbers = [block_number(block_hash) for block_hash in split_chain(saved.chain)]
    pool.pins.add(b"k", numbers, 60.0, pool.now_s - 40.0, "t")
    pool.pins.add(b"gone", [numbers[0], 5], None, pool.now_s)
    hot = pool.migration.hot_prefixes()
    save, used, *others = hot.runs
    assert (save.kind, save.hashes) == ("save", saved.chain)
    assert hot.saves == (SavedPrefix(b"k", "t", 60.0, 40.0, 0),)
    assert used.token_ids == np.zeros(4, "<i4").tobytes()
    assert all(other.heat < used.heat for other in others)


def test_the_space_excludes_used_and_hotter_blocks() -> None:
    """Blocks in use are no space; cached prefixes make way for a hotter one."""
    pool = Pool()
    assert pool.migration.cache_room().blocks_for(0.0) == BLOCKS
    for scope, tokens in ((SCOPE, [0] * 7), (SCOPE, [0] * 7), (ADAPTER, [1] * 5)):
        pool.compute(prefix_of(scope, tokens))
    room = pool.migration.cache_room()
    assert room.free_blocks == BLOCKS - 5
    assert (room.blocks_for(0.0), room.blocks_for(1.5), room.blocks_for(9.0)) == (7, 9, 12)
    pool.kv_usage = 9 / BLOCKS
    room = pool.migration.cache_room()
    assert (room.free_blocks, room.blocks_for(9.0)) == (0, 3)
    pool.kv_usage = 1.0
    assert pool.migration.cache_room().blocks_for(9.0) == 0


def test_owners_are_remembered_within_bounds() -> None:
    """The most recent owners are remembered, as many as prefixes fit in the pool."""
    pool = Pool()
    for number in range(3 * BLOCKS):
        pool.migration.note_owner(bytes([number]), SCOPE, "t")
    assert list(pool.migration._owners) == [bytes([number]) for number in range(2 * BLOCKS, 3 * BLOCKS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(data=st.data())
def test_rows_put_elsewhere_are_the_same_blocks_and_touch_no_other(dtype: torch.dtype, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, BLOCKS - 1), unique=True, min_size=1, max_size=BLOCKS))
    to = data.draw(st.permutations(range(BLOCKS)))[: len(ids)]
    source, target = layers(dtype), {name: torch.zeros_like(layer) for name, layer in layers(dtype).items()}
    BlockRows(target).write(to, BlockRows(source).read(ids))
    for name, layer in target.items():
        wanted = torch.zeros_like(layer)
        wanted[to] = source[name][ids]
        assert torch.equal(layer, wanted)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_blocks_that_kernels_divide_are_whole_rows(parts: int) -> None:
    """A GPU's kernels may have smaller blocks, and heads outside of tokens: rows are whole blocks, heads first."""
    whole = torch.arange(BLOCKS * parts * 4).view(BLOCKS, -1)
    divided = whole.reshape(BLOCKS * parts, 2, 2).transpose(1, 2).contiguous().transpose(1, 2)
    rows = BlockRows({"a": divided}, BLOCKS)
    assert np.array_equal(rows.read([3, 1]), BlockRows({"a": whole}).read([3, 1]))
    rows.write([0], rows.read([3]))
    assert torch.equal(divided.reshape(BLOCKS, -1)[[0, 3]], whole[[3, 3]])


def test_rows_that_do_not_fit_change_nothing() -> None:
    target = layers(torch.float32)
    rows = BlockRows(target)
    for wrong in (rows.read([1])[:, 1:], rows.read([1, 2]), rows.read([])):
        with pytest.raises(ValueError, match="rows of shape"):
            rows.write([3], wrong)
    assert all(torch.equal(layer, layers(torch.float32)[name]) for name, layer in target.items())


def test_rows_of_other_layers_have_another_layout() -> None:
    """A drafter's layers, or another order, make another format; nothing of it is loaded."""
    own = layers(torch.float32)
    assert BlockRows(own).layout == "float32[3, 2, 2] of a, b; float32[3, 2, 1] of draft"
    others = [{"a": own["a"], "b": own["b"]}, dict(reversed(own.items())), layers(torch.bfloat16)]
    assert len({BlockRows(made).layout for made in (own, *others)}) == 4


def test_a_job_crosses_to_the_core() -> None:
    job = TransferJob("import", "/file", 2, 9)
    params = job.to_extra_args()["kv_transfer_params"]
    assert TransferJob.of_params(msgspec.msgpack.decode(msgspec.msgpack.encode(params))) == job
    assert TransferJob.of_params(None) is None
    assert TransferJob.of_params({"other": 1}) is None


@given(blocks=st.integers(1, 6), first=st.integers(0, 6), most=st.none() | st.integers(0, 6))
def test_an_export_is_the_held_part_of_the_chain(
    tmp_path_factory: pytest.TempPathFactory, blocks: int, first: int, most: int | None
) -> None:
    pool, prefix = Pool(tmp_path_factory.mktemp("pool") / "p"), prefix_of(SCOPE, prompt(blocks * SIZE + 1))
    pool.compute(prefix)
    part = pool.migration.export_prefix(prefix, first, most)
    end = blocks if most is None else min(blocks, first + most)
    if end <= first:
        assert part is None
        assert not pool.jobs
        return
    assert part is not None
    assert np.array_equal(part.payload, pool.rows.read(range(first, end)))
    assert not list(pool.directory.glob("kv-[0-9]*"))
    assert pool.migration.export_prefix(prefix_of(OTHER, prefix.token_ids), first, most) is None


def test_foreign_blocks_never_reach_vllm(tmp_path: Path) -> None:
    holder, asker = Pool(tmp_path / "holder"), Pool(tmp_path / "asker")
    own, others = prefix_of(SCOPE, prompt(6 * SIZE)), prefix_of(SCOPE, prompt(6 * SIZE, seed=9))
    holder.compute(own)
    part = holder.migration.export_prefix(own, 0, None)
    assert part is not None
    broken = part.payload.copy()
    broken[1, 2] ^= 1

    def changed(**header: Any) -> KvChain:
        return KvChain(msgspec.structs.replace(part.header, **header), part.payload)

    for wrong, prefix, first in (
        (KvChain(part.header, broken), own, 0),
        (KvChain(part.header, part.payload[:-1]), own, 0),
        (changed(format=msgspec.structs.replace(part.header.format, model="m/vllm-other")), own, 0),
        (changed(root=b""), own, 0),
        (changed(root=root_of(OTHER)), own, 0),
        (part, prefix_of(OTHER, own.token_ids), 0),
        (part, others, 0),
        (part, HashedTokens(SCOPE, others.token_ids, own.chain), 0),
        (part, own, 1),
    ):
        with pytest.raises(TransferError):
            asker.migration.import_part(wrong, prefix, first)
    assert not asker.jobs
    asker.migration.import_part(part, own, 0)
    assert asker.held.count_held(own.chain, 6) == 6
    assert asker.migration.hot_prefixes().runs[0].hashes == own.chain, "it can be handed on"
    assert not list(asker.directory.glob("kv-[0-9]*"))
    closed = asker.make(copies=False)
    assert closed.export_prefix(own, 0, None) is None
    with pytest.raises(TransferError, match="takes no KV"):
        closed.import_part(part, own, 0)
