"""Runs the connector's jobs in vLLM: each is a request of one token, and copies go before all other requests."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from router.protocol.block_hash import HASH_BYTES
from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.protocol import EngineError
from serve_app.engine.vllm.frontend import VllmFrontend
from serve_app.engine.vllm.scheduling.tenant import salt_of, scope_args, shares_args
from serve_app.engine.vllm.transfer.job import TransferJob

_FIRST = -1
"""vLLM's priority of a job; requests have 0. A copy costs a part of a step, and its waiting request has a deadline."""

_SAMPLING = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": None}


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
        extra = {} if shares is None else {"extra_args": shares_args(shares)}
        self._frontend.call(self._run(extra, _FIRST, [0], bytes(HASH_BYTES), "")).result()

    async def run(self, job: TransferJob, token_ids: Sequence[int], root: bytes, lora: str) -> int:
        """Run a job; return how many tokens were cached. ``root`` as in ``EngineRequest``.

        Raises EngineError or LookupError.
        """
        extra = job.to_extra_args() | scope_args(root, job.public_tokens)
        priority = 0 if job.kind == "pin" else _FIRST  # a pin may compute its blocks
        return await self._run({"extra_args": extra}, priority, token_ids, root, lora)

    async def _run(
        self, fields: Mapping[str, Any], priority: int, token_ids: Sequence[int], root: bytes, lora: str
    ) -> int:
        self._slots.pin(lora)
        try:
            weights = self._slots.weights(lora) if lora else None
            self._begins()
            sampling = {**_SAMPLING, **fields}
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
