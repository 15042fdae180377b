"""Host memory for vLLM's CPU build, whose own offloading copies by a GPU's streams: these copies are made at once.

For measurements and tests: everything but the copies is vLLM's own, in its scheduler, connector and events.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from serve_app.engine.vllm.settings import VllmSettings


@dataclass(frozen=True, slots=True)
class OnCpu(VllmSettings):
    """vLLM's settings, with this memory."""

    offloading: Mapping[str, Any] = field(
        default_factory=lambda: {"spec_name": "CpuMemory", "spec_module_path": __name__}
    )


@contextmanager
def offloading_on_cpu() -> Iterator[None]:
    """Let ``make_engine`` accept `kv_offloading_size` without a GPU."""
    with (
        patch("serve_app.engine.vllm.refusals.refused_settings", lambda *_, **__: []),
        patch("serve_app.engine.vllm.settings.VllmSettings", OnCpu),
    ):
        yield


class CpuMemory(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's memory, with copies on a CPU."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return the copies' half, which lives beside the model."""
        return _Copies([cache.tensor for cache in kv_caches.tensors], self.num_chunks)


class _Copies(OffloadingWorker):  # type: ignore[misc]
    def __init__(self, pool: list[torch.Tensor], chunks: int) -> None:
        self._pool = pool
        self._host = [torch.empty((chunks, layer.shape[1]), dtype=layer.dtype) for layer in pool]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, zip(self._host, self._pool, strict=True), dst_spec, src_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, zip(self._pool, self._host, strict=True), dst_spec, src_spec)

    def _copy(self, job_id: int, layers: Any, target: Any, source: Any) -> bool:
        began_s, size = time.perf_counter(), 0
        into, of = (torch.from_numpy(spec.block_ids).long() for spec in (target, source))
        for written, read in layers:
            written[into] = read[of]
            size += len(into) * read.shape[1]
        self._done.append(TransferResult(job_id, True, size, time.perf_counter() - began_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        return
