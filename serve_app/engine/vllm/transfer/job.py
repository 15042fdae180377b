"""Jobs of one-token requests for the connector, and how vLLM runs them; copies go first.

Blocks of an engine's layers are rows of bytes, in its order. Knows torch and no vllm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from router.protocol.block_hash import HASH_BYTES
from serve_app.cache.kv_chain import Row
from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.protocol import EngineError
from serve_app.engine.vllm.frontend import VllmFrontend
from serve_app.engine.vllm.scheduling.tenant import salt_of, scope_args, shares_args, tenant_args


class BlockRows:
    """The layers' tensors; their first dimension is the pool's blocks. ``block_bytes``: bytes of a row."""

    def __init__(self, layers: Mapping[str, torch.Tensor], num_blocks: int | None = None) -> None:
        """Raise ValueError if the layers' KV differs in shape or dtype: one format cannot describe a block then.

        ``num_blocks``: the pool's; kernels of a GPU may divide each into equal parts, which follow each other.
        """
        if num_blocks is not None:
            whole = {name: _divided(layer, num_blocks) for name, layer in layers.items()}
            layers = {name: layer[:, 0] if layer.shape[1] == 1 else layer for name, layer in whole.items()}
        kinds = {(layer.dtype, layer.shape) for layer in layers.values()}
        if len(kinds) != 1:
            raise ValueError(f"the layers' KV is of {len(kinds)} kinds")
        ((self.dtype, shape),) = kinds
        self.names = tuple(layers)
        self.shape = tuple(shape[1:])
        self._layers = tuple(layers.values())
        self._values = int(np.prod(self.shape))
        self._width = self.dtype.itemsize * self._values
        self.block_bytes = self._width * len(self._layers)

    def read(self, block_ids: Sequence[int]) -> Row:
        """Return the rows [blocks, block_bytes] of blocks."""
        rows = np.empty((len(block_ids), self.block_bytes), np.uint8)
        for index, layer in enumerate(self._layers):
            own = layer[list(block_ids)].cpu().reshape(len(block_ids), self._values).contiguous().view(torch.uint8)
            rows[:, index * self._width : (index + 1) * self._width] = own.numpy()
        return rows

    def write(self, block_ids: Sequence[int], rows: Row) -> None:
        """Write rows into blocks. Raises ValueError, changing nothing, if their shape does not fit."""
        if rows.shape != (len(block_ids), self.block_bytes):
            raise ValueError(f"rows of shape {rows.shape} for {len(block_ids)} blocks")
        for index, layer in enumerate(self._layers):
            own = np.ascontiguousarray(rows[:, index * self._width : (index + 1) * self._width])
            layer[list(block_ids)] = (
                torch.from_numpy(own).view(self.dtype).reshape(len(block_ids), *self.shape).to(layer.device)
            )


def _divided(layer: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return a view [num_blocks, parts, ...] of a layer [num_blocks * parts, ...] of any strides."""
    parts = len(layer) // num_blocks
    first, *rest = layer.stride()
    return layer.as_strided((num_blocks, parts, *layer.shape[1:]), (parts * first, first, *rest))


LAYOUT_FILE = "kv_layout.json"
"""File of each rank's description of its part of the blocks: a ``KvPart``."""


def rank_file(file: str, rank: int) -> str:
    """Return the path of a rank's own part of ``file``."""
    return f"{file}.{rank}"


_FIRST = -1
"""vLLM's priority of a job; requests have 0. A copy costs a part of a step, and its waiting request has a deadline."""

_SAMPLING = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": None}


class TransferJob(msgspec.Struct, frozen=True):
    """``kind``, for the prompt's blocks ``first`` to ``end`` - 1 of ``tenant``. ``file``: their rows, a file per rank.

    ``public_tokens``: number of the prompt's public tokens.
    "pin": keep them in the pool, under the name ``file``, until an "unpin" with this name.
    """

    kind: Literal["export", "import", "pin", "unpin"]
    file: str
    first: int = 0
    end: int = 0
    tenant: str = ""
    public_tokens: int = 0

    def to_extra_args(self) -> dict[str, Any]:
        """Return this job as ``SamplingParams.extra_args``."""
        return {"kv_transfer_params": {"warmpath": msgspec.to_builtins(self)}, **tenant_args(self.tenant)}

    @classmethod
    def of_params(cls, params: Mapping[str, Any] | None) -> TransferJob | None:
        """Return the job in a request's ``kv_transfer_params``; None for an ordinary request."""
        packed = (params or {}).get("warmpath")
        return None if packed is None else msgspec.convert(packed, cls)


class JobRunner:
    """Runs jobs in vLLM. ``begins`` is called before each (any thread): its one token belongs to no prompt."""

    def __init__(self, frontend: VllmFrontend, adapters: LoadedAdapters[Any], begins: Callable[[], None]) -> None:
        self._frontend = frontend
        self._slots = adapters
        self._begins = begins
        self._numbers = count()

    def wait(self, job: TransferJob, token_ids: Sequence[int], root: bytes, lora: str) -> int:
        """Run a job to its end (any thread but the loop's); results and errors as in ``run``."""
        return self._frontend.call(self.run(job, token_ids, root, lora)).result()

    def step(self, shares: Mapping[str, float] | None = None) -> None:
        """Make vLLM compute a step with one token of no tenant (any thread but the loop's).

        ``shares``: weights of tenants that its scheduler uses from then on.
        """
        told = {} if shares is None else {"extra_args": shares_args(shares)}
        self._frontend.call(self._run(told, _FIRST, [0], bytes(HASH_BYTES), "")).result()

    async def run(self, job: TransferJob, token_ids: Sequence[int], root: bytes, lora: str) -> int:
        """Run a job; return how many tokens were cached. ``root`` as in ``EngineRequest``.

        Raises EngineError or LookupError.
        """
        told = job.to_extra_args() | scope_args(root, job.public_tokens)
        priority = 0 if job.kind == "pin" else _FIRST  # a pin may compute its blocks
        return await self._run({"extra_args": told}, priority, token_ids, root, lora)

    async def _run(
        self, told: Mapping[str, Any], priority: int, token_ids: Sequence[int], root: bytes, lora: str
    ) -> int:
        self._slots.pin(lora)
        try:
            weights = self._slots.weights(lora) if lora else None
            self._begins()
            sampling = {**_SAMPLING, **told}
            name, cached = f"job {next(self._numbers)}", 0
            parts = self._frontend.generate(name, list(token_ids), salt_of(root), sampling, weights, priority=priority)
            async for part in parts:
                cached = max(cached, part.cached_tokens)
            return cached
        except (LookupError, EngineError):
            raise
        except Exception as error:
            raise EngineError(f"vLLM could not copy KV: {type(error).__name__}") from error
        finally:
            self._slots.unpin(lora)
