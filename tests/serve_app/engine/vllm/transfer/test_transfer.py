"""KV between a pool like vLLM's and files, and what is refused on the way, without vLLM."""

from __future__ import annotations

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
from serve_app.cache.kv_chain import KvChain, KvPart, TransferError
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.cache.prefix.pins import Pins
from serve_app.engine.vllm.events.pool import VllmPool
from serve_app.engine.vllm.frontend import ModelFacts
from serve_app.engine.vllm.settings import VllmSettings
from serve_app.engine.vllm.transfer.block_rows import BlockRows
from serve_app.engine.vllm.transfer.job import LAYOUT_FILE, Job
from serve_app.engine.vllm.transfer.migration import RunJob, VllmMigration
from tests.serve_app.engine.tiny import VOCAB, prompt, root_of
from tests.serve_app.engine.vllm.pool_model import hold

SIZE, BLOCKS = 4, 12
SCOPE, OTHER = PrefixScope("m"), PrefixScope("m", salt=b"other")


def layers(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Two layers' KV, blocks first; the second is not contiguous, as some kernels want it."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.rand(BLOCKS, 3, SIZE, 2, generator=generator).to(dtype) for _ in range(2)]
    return {"a": made[0], "b": made[1].transpose(2, 3).contiguous().transpose(2, 3)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(data=st.data())
def test_rows_put_elsewhere_are_the_same_blocks_and_touch_no_other(dtype: torch.dtype, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, BLOCKS - 1), unique=True, min_size=1, max_size=BLOCKS))
    to = data.draw(st.permutations(range(BLOCKS)))[: len(ids)]
    source, target = layers(dtype), {name: torch.zeros_like(layer) for name, layer in layers(dtype).items()}
    rows = BlockRows(source).read(ids)
    BlockRows(target).write(to, rows)
    for name, layer in target.items():
        wanted = torch.zeros_like(layer)
        for old, new in zip(ids, to, strict=True):
            wanted[new] = source[name][old]
        assert torch.equal(layer, wanted)


def test_rows_that_do_not_fit_change_nothing() -> None:
    target = layers(torch.float32)
    rows = BlockRows(target)
    for wrong in (rows.read([1])[:, 1:], rows.read([1, 2]), rows.read([])):
        with pytest.raises(ValueError, match="rows of shape"):
            rows.write([3], wrong)
    assert all(torch.equal(layer, layers(torch.float32)[name]) for name, layer in target.items())
    with pytest.raises(ValueError, match="of 2 kinds"):
        BlockRows({"a": torch.zeros(2, 2), "b": torch.zeros(2, 3)})


def test_a_job_crosses_to_the_core() -> None:
    job = Job("import", "/file", 2, 9)
    params = job.to_extra_args()["kv_transfer_params"]
    assert Job.of_params(msgspec.msgpack.decode(msgspec.msgpack.encode(params))) == job
    assert Job.of_params(None) is None
    assert Job.of_params({"other": 1}) is None


def migration_of(held: VllmPool, directory: Path, run: RunJob, *, transfer: bool = True) -> VllmMigration:
    settings = VllmSettings("m", block_size=SIZE, model_fingerprint="m", transfer=transfer)
    return VllmMigration(settings, ModelFacts(VOCAB, 1000, BLOCKS), held, Pins(0), directory, run)


class Pool:
    """What vLLM and its connector do with a job, over torch tensors; ``held``: what the events told of it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.rows = BlockRows(layers(torch.float32))
        part = KvPart("float32", (2, *self.rows.shape), axes="vllm 0.32.0 on AVX2: layers a, b; block")
        (directory / LAYOUT_FILE).write_bytes(msgspec.json.encode(part))
        self.held, self.jobs, self.directory = VllmPool(SIZE, BLOCKS), list[Job](), directory
        self.migration = migration_of(self.held, directory, self.run)

    def hold(self, root: bytes, ids: np.ndarray) -> list[int]:
        """Hold a chain; return its blocks, numbered as they came."""
        chain = hold(self.held, root, ids, SIZE)
        numbers = list(self.held)
        return [numbers.index(block_hash) for block_hash in split_chain(chain)]

    def run(self, job: Job, token_ids: Sequence[int], root: bytes, lora: str) -> int:
        self.jobs.append(job)
        assert len(token_ids) == job.end * SIZE + 1
        ids = np.array(token_ids, np.int32)
        held = self.held.known(extend_chain(root, 0, ids, SIZE), job.end)
        blocks = self.hold(root, ids)
        if job.kind == "export":
            self.rows.read(blocks[job.first : held]).tofile(job.file)
        else:
            rows = np.fromfile(job.file, np.uint8).reshape(-1, self.rows.block_bytes)
            self.rows.write(blocks[job.first :], rows)
        return held * SIZE


def prefix_of(scope: PrefixScope, ids: np.ndarray) -> HashedTokens:
    return HashedTokens(scope, ids, extend_chain(root_of(scope), 0, ids, SIZE))


@given(blocks=st.integers(1, 6), first=st.integers(0, 6), most=st.none() | st.integers(0, 6))
def test_what_leaves_is_what_is_held_of_the_chain(
    tmp_path_factory: pytest.TempPathFactory, blocks: int, first: int, most: int | None
) -> None:
    ids = prompt(blocks * SIZE + 2)
    pool = Pool(tmp_path_factory.mktemp("pool") / "p")
    pool.hold(root_of(SCOPE), ids)
    part = pool.migration.export_prefix(prefix_of(SCOPE, ids), first, most)
    end = blocks if most is None else min(blocks, first + most)
    if end <= first:
        assert part is None
        assert not pool.jobs
        return
    assert part is not None
    assert np.array_equal(part.payload, pool.rows.read(range(first, end)))
    assert not list(pool.directory.glob("kv-[0-9]*"))
    assert pool.migration.export_prefix(prefix_of(OTHER, ids), first, most) is None


def test_what_is_not_the_askers_own_never_reaches_vllm(tmp_path: Path) -> None:
    ids, other_ids = prompt(6 * SIZE), prompt(6 * SIZE, seed=9)
    own = prefix_of(SCOPE, ids)
    holder, asker = Pool(tmp_path / "holder"), Pool(tmp_path / "asker")
    holder.hold(root_of(SCOPE), ids)
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
        (part, prefix_of(OTHER, ids), 0),
        (part, prefix_of(SCOPE, other_ids), 0),
        (part, HashedTokens(SCOPE, other_ids, own.chain), 0),
        (part, own, 1),
    ):
        with pytest.raises(TransferError):
            asker.migration.import_part(wrong, prefix, first)
    assert not asker.jobs
    asker.migration.import_part(part, own, 0)
    assert asker.held.known(own.chain, 6) == 6
    assert not list(asker.directory.glob("kv-[0-9]*"))
    closed = migration_of(asker.held, asker.directory, asker.run, transfer=False)
    assert closed.export_prefix(own, 0, None) is None
    with pytest.raises(TransferError, match="takes no KV"):
        closed.import_part(part, own, 0)
