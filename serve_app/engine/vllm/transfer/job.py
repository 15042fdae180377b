"""Jobs of one-token requests for the connector, and how vLLM runs them; copies go first.

Blocks of an engine's layers are rows of bytes, in its order. Knows torch and no vllm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, groupby
from math import prod
from operator import itemgetter
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
    """The layers' tensors, of any shapes; their first dimension is the pool's blocks. ``block_bytes``: of a row.

    ``layout``: what a row holds, in its order. Rows of equal layouts fit each other.
    """

    def __init__(self, layers: Mapping[str, torch.Tensor], num_blocks: int | None = None) -> None:
        """``num_blocks``: the pool's; kernels of a GPU may divide each into equal parts, which follow each other."""
        if num_blocks is not None:
            whole = {name: _divided(layer, num_blocks) for name, layer in layers.items()}
            layers = {name: layer[:, 0] if layer.shape[1] == 1 else layer for name, layer in whole.items()}
        self._layers = tuple(layers.values())
        kinds = [f"{str(layer.dtype).removeprefix('torch.')}{list(layer.shape[1:])}" for layer in self._layers]
        named = groupby(zip(kinds, layers, strict=True), itemgetter(0))
        self.layout = "; ".join(f"{kind} of {', '.join(name for _, name in same)}" for kind, same in named)
        self._widths = [layer.itemsize * prod(layer.shape[1:]) for layer in self._layers]
        self.block_bytes = sum(self._widths)

    def read(self, block_ids: Sequence[int]) -> Row:
        """Return the rows [blocks, block_bytes] of blocks."""
        rows = np.empty((len(block_ids), self.block_bytes), np.uint8)
        for layer, own in self._parts(rows):
            own[:] = layer[list(block_ids)].cpu().flatten(1).contiguous().view(torch.uint8).numpy()
        return rows

    def write(self, block_ids: Sequence[int], rows: Row) -> None:
        """Write rows into blocks. Raises ValueError, changing nothing, if their shape does not fit."""
        if rows.shape != (len(block_ids), self.block_bytes):
            raise ValueError(f"rows of shape {rows.shape} for {len(block_ids)} blocks")
        for layer, own in self._parts(rows):
            values = torch.from_numpy(np.ascontiguousarray(own)).view(layer.dtype)
            layer[list(block_ids)] = values.view(len(block_ids), *layer.shape[1:]).to(layer.device)

    def _parts(self, rows: Row) -> Iterator[tuple[torch.Tensor, Row]]:
        """Yield each layer with its columns of ``rows``."""
        end = 0
        for layer, width in zip(self._layers, self._widths, strict=True):
            end += width
            yield layer, rows[:, end - width : end]


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
