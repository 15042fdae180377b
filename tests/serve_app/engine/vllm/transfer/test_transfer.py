"""KV between a pool like vLLM's and files, and what is refused on the way, without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import HASH_BYTES, PrefixScope, extend_chain
from serve_app.cache.kv_chain import KvChain, TransferError
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.engine.vllm.transfer.block_rows import BlockRows, UnevenLayers
from serve_app.engine.vllm.transfer.job import LAYOUT_FILE, Job, Layout
from serve_app.engine.vllm.transfer.transfer import VllmTransfer, format_of
from tests.serve_app.engine.tiny import prompt, root_of

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
    with pytest.raises(UnevenLayers):
        BlockRows({"a": torch.zeros(2, 2), "b": torch.zeros(2, 3)})


def test_a_job_crosses_to_the_core() -> None:
    job = Job("import", "/file", 2, 9)
    params = job.to_extra_args()["kv_transfer_params"]
    assert Job.of_params(msgspec.msgpack.decode(msgspec.msgpack.encode(params))) == job
    assert Job.of_params(None) is None
    assert Job.of_params({"other": 1}) is None


class Pool:
    """What vLLM and its connector do with a job, over torch tensors: chains of blocks by their root and tokens."""

    def __init__(self, directory: Path, held: Sequence[tuple[bytes, np.ndarray]] = ()) -> None:
        directory.mkdir()
        self.rows = BlockRows(layers(torch.float32))
        layout = Layout("0.32.0", "AVX2", "float32", self.rows.shape, self.rows.names)
        (directory / LAYOUT_FILE).write_bytes(msgspec.json.encode(layout))
        self.format = format_of(directory, "m", SIZE)
        self.chains: dict[bytes, int] = {}
        self.roots = {extend_chain(root, 0, ids, SIZE)[:HASH_BYTES]: root for root, ids in held}
        self.jobs: list[Job] = []
        for root, ids in held:
            self._hold(extend_chain(root, 0, ids, SIZE))
        self.directory = directory
        self.transfer = VllmTransfer(
            self.format, directory, 1000, self.run, self.known, lambda first: self.roots.get(first, b"")
        )

    def _hold(self, chain: bytes) -> None:
        for at in range(HASH_BYTES, len(chain) + 1, HASH_BYTES):
            self.chains.setdefault(chain[:at], len(self.chains))

    def known(self, chain: bytes, most: int) -> int:
        known = 0
        while known < most and chain[: (known + 1) * HASH_BYTES] in self.chains:
            known += 1
        return known

    def run(self, job: Job, token_ids: Sequence[int], root: bytes, lora: str) -> int:
        self.jobs.append(job)
        chain = extend_chain(root, 0, np.array(token_ids, np.int32), SIZE)
        held = self.known(chain, len(token_ids) // SIZE)
        assert len(token_ids) == job.end * SIZE + 1
        if job.kind == "export":
            ids = [self.chains[chain[: (at + 1) * HASH_BYTES]] for at in range(job.first, min(held, job.end))]
            self.rows.read(ids).tofile(job.file)
        else:
            self._hold(chain)
            ids = [self.chains[chain[: (at + 1) * HASH_BYTES]] for at in range(job.first, job.end)]
            self.rows.write(ids, np.fromfile(job.file, np.uint8).reshape(-1, self.rows.block_bytes))
        return held * SIZE


@given(blocks=st.integers(1, 6), first=st.integers(0, 6), most=st.none() | st.integers(0, 6))
def test_what_leaves_is_what_is_held_of_the_chain(
    tmp_path_factory: pytest.TempPathFactory, blocks: int, first: int, most: int | None
) -> None:
    ids = prompt(blocks * SIZE + 2)
    pool = Pool(tmp_path_factory.mktemp("pool") / "p", [(root_of(SCOPE), ids)])
    chain = extend_chain(root_of(SCOPE), 0, ids, SIZE)
    part = pool.transfer.export_prefix(HashedTokens(SCOPE, ids, chain), first, most)
    end = blocks if most is None else min(blocks, first + most)
    if end <= first:
        assert part is None
        assert not pool.jobs
        return
    assert part is not None
    assert np.array_equal(part.payload, pool.rows.read(range(first, end)))
    assert not list(pool.directory.glob("kv-[0-9]*"))
    assert (
        pool.transfer.export_prefix(HashedTokens(OTHER, ids, extend_chain(root_of(OTHER), 0, ids, SIZE)), first, most)
        is None
    )


def test_what_is_not_the_askers_own_never_reaches_vllm(tmp_path: Path) -> None:
    ids = prompt(6 * SIZE)
    chain = extend_chain(root_of(SCOPE), 0, ids, SIZE)
    holder = Pool(tmp_path / "holder", [(root_of(SCOPE), ids)])
    part = holder.transfer.export_prefix(HashedTokens(SCOPE, ids, chain), 0, None)
    assert part is not None
    asker = Pool(tmp_path / "asker")
    broken = part.payload.copy()
    broken[1, 2] ^= 1
    layout = msgspec.structs.replace(part.header.format, model="m/vllm-other")
    other_ids = prompt(6 * SIZE, seed=9)
    for wrong, scope, tokens, hashes, first in (
        (KvChain(part.header, broken), SCOPE, ids, chain, 0),
        (KvChain(part.header, part.payload[:-1]), SCOPE, ids, chain, 0),
        (KvChain(msgspec.structs.replace(part.header, format=layout), part.payload), SCOPE, ids, chain, 0),
        (KvChain(msgspec.structs.replace(part.header, root=b""), part.payload), SCOPE, ids, chain, 0),
        (KvChain(msgspec.structs.replace(part.header, root=root_of(OTHER)), part.payload), SCOPE, ids, chain, 0),
        (part, OTHER, ids, extend_chain(root_of(OTHER), 0, ids, SIZE), 0),
        (part, SCOPE, other_ids, extend_chain(root_of(SCOPE), 0, other_ids, SIZE), 0),
        (part, SCOPE, other_ids, chain, 0),
        (part, SCOPE, ids, chain, 1),
    ):
        with pytest.raises(TransferError):
            asker.transfer.import_part(wrong, HashedTokens(scope, tokens, hashes), first)
    assert not asker.jobs
    asker.transfer.import_part(part, HashedTokens(SCOPE, ids, chain), 0)
    assert asker.known(chain, 6) == 6
    assert not list(asker.directory.glob("kv-[0-9]*"))
