"""vLLM's KV connector: copies whole blocks between its pool and files, and keeps some, as ``TransferJob``s request.

One half lives with vLLM's scheduler and knows a request's blocks; the other, with its worker, copies around a step.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from serve_app.cache.kv_chain import KvPart
from serve_app.engine.vllm.transfer.job import LAYOUT_FILE, BlockRows, TransferJob, rank_file

_log = logging.getLogger(__name__)

_KEPT = frozenset({"full_attention", "mla_attention", "sliding_window", "sliding_window_mla"})
"""Kinds of layers whose blocks can be pinned: a state is not a block of its own."""


@dataclass
class StepCopies(KVConnectorMetadata):  # type: ignore[misc]
    """One step's copies: file and blocks, and for a load the first wanted row of the file."""

    loads: list[tuple[str, list[int], int]] = field(default_factory=list)
    saves: list[tuple[str, list[int]]] = field(default_factory=list)


class WarmpathConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both halves; vLLM creates one of each."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        given = vllm_config.kv_transfer_config.kv_connector_extra_config
        kinds = [get_kv_cache_spec_kind(group.kv_cache_spec).value for group in kv_cache_config.kv_cache_groups]
        self._copies = given["copies"]
        if self._copies and kinds not in (["full_attention"], ["mla_attention"]):
            raise ValueError(f"KV of {kinds} is not copied: set kv_pull, prewarm, handover off")
        if not _KEPT.issuperset(kinds):
            raise ValueError(f"KV of {kinds} is not kept: set pin_budget off")
        self._sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self._size = vllm_config.cache_config.block_size
        self._num_blocks = kv_cache_config.num_blocks
        self._parallel = vllm_config.parallel_config
        self._directory = Path(given["directory"])
        self._loading: dict[str, int] = {}
        self._jobs: dict[str, TransferJob] = {}
        self._pins: dict[str, list[Any]] = {}
        self._pool: Any = None
        self._rows: BlockRows | None = None
        self._failed: set[int] = set()

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Store the pool; a pin is one more user of its blocks."""
        self._pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        """Note a request's job."""
        job = TransferJob.of_params(request.kv_transfer_params)
        if job is None:
            return
        if job.kind == "unpin":
            self._pool.free_blocks(reversed(self._pins.pop(job.file, [])))
        else:
            self._jobs[request.request_id] = job

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens an import adds to the held ones; 0 if blocks before it are missing."""
        job = self._jobs.get(request.request_id)
        if job is None or job.kind != "import" or num_computed_tokens < job.first * self._size:
            return 0, False
        return max(0, job.end * self._size - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note how many blocks of a request will be loaded."""
        if num_external_tokens:
            self._loading[request.request_id] = num_external_tokens // self._size

    def build_connector_meta(self, scheduler_output: Any) -> StepCopies:
        """Return the worker's copies for this step."""
        copies = StepCopies()
        for new in scheduler_output.scheduled_new_reqs:
            job = self._jobs.get(new.req_id)
            if job is None or job.kind == "pin":
                continue
            del self._jobs[new.req_id]
            cached = new.num_computed_tokens // self._size
            if job.kind == "export":
                if cached > job.first:
                    copies.saves.append((job.file, list(new.block_ids[0][job.first : min(cached, job.end)])))
            elif count := self._loading.pop(new.req_id, 0):
                copies.loads.append(
                    (job.file, list(new.block_ids[0][cached - count : cached]), cached - count - job.first)
                )
        return copies

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; only pinned blocks stay in use: of a window its last ones, at a prompt's end."""
        job = self._jobs.pop(request.request_id, None)
        if job is not None and job.kind == "pin" and request.num_computed_tokens >= job.end * self._size:
            ends = [job.end * self._size // size for size in self._sizes]
            blocks = [
                self._pool.blocks[block] for group, end in zip(block_ids, ends, strict=True) for block in group[:end]
            ]
            self._pins[job.file] = kept = [block for block in blocks if not block.is_null]
            self._pool.touch(kept)
        self._loading.pop(request.request_id, None)
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Store the worker's layers, and write a description of them, for copies."""
        if not self._copies:
            return
        self._rows = rows = BlockRows(kv_caches, self._num_blocks)
        chip = _chip(next(iter(kv_caches.values())).device)
        axes = f"vllm {vllm.__version__} on {chip}: {rows.layout}"
        part = KvPart("uint8", (rows.block_bytes,), axes=axes)
        (self._directory / rank_file(LAYOUT_FILE, self._parallel.rank)).write_bytes(msgspec.json.encode(part))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load this step's files into their blocks; vLLM computes blocks that fail."""
        for file, block_ids, first in self._get_connector_metadata().loads:
            assert self._rows is not None
            try:
                own = rank_file(file, self._parallel.rank)
                rows = np.fromfile(own, np.uint8).reshape(-1, self._rows.block_bytes)
                self._rows.write(block_ids, rows[first : first + len(block_ids)])
            except (OSError, ValueError):
                _log.exception("%d blocks could not be loaded", len(block_ids))
                self._failed.update(block_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that this step could not load."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads end before the forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are copied once they are complete."""

    def wait_for_save(self) -> None:
        """Write this step's exports."""
        for file, block_ids in self._get_connector_metadata().saves:
            assert self._rows is not None
            own = rank_file(file, self._parallel.rank)
            try:
                self._rows.read(block_ids).tofile(own)
            except OSError:
                _log.exception("%d blocks could not be exported", len(block_ids))
                Path(own).unlink(missing_ok=True)


def _chip(device: torch.device) -> str:
    """Return the kind of processor, on which vLLM's choice of kernels, and so the order inside a block, depends."""
    if device.type == "cpu":
        return str(torch.backends.cpu.get_cpu_capability())
    return "sm{}{}".format(*torch.cuda.get_device_capability(device))
