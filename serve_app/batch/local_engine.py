"""A source of tokens that is an engine in this process, with its adapters; what a replica and a router are to a server.

Owns the engine's life here, and when each request's prefill began and ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from serve_app.checkpoints.checkpoint import CheckpointInfo
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import Engine, EngineError, EngineOutput, EngineRequest
from serve_app.errors import GenerationFailed, InvalidRequest
from serve_app.generation.generation import Generation, Tokens
from serve_app.replica.adapter_loader import ReplicaAdapters
from serve_app.replica.engine_factory import make_engine
from serve_app.replica.token_streams import TokenStream


@dataclass(slots=True)
class Work:
    """What one request took. ``prefill_s``: without its wait for a place in the engine."""

    prompt_tokens: int
    reused_tokens: int = 0
    prefill_s: float = 0.0
    generated_tokens: int = 0
    generation_s: float = 0.0


class LocalEngine:
    """A running engine. ``work``: of each request that had a first token, by its id."""

    def __init__(self, engine: Engine, adapters: ReplicaAdapters) -> None:
        self._engine = engine
        self.adapters = adapters
        self.work: dict[str, Work] = {}

    @classmethod
    @asynccontextmanager
    async def running(cls, config: AppConfig, info: CheckpointInfo) -> AsyncIterator[Self]:
        """Load the model and its adapters, and stop the engine in the end. Raises ValueError for what cannot be run."""
        engine = await asyncio.to_thread(make_engine, config, info, lambda _: None)
        try:
            adapters = ReplicaAdapters(config, engine)
            await adapters.preload()
            engine.start()
            yield cls(engine, adapters)
        finally:
            await asyncio.to_thread(engine.stop)

    async def generate(self, generation: Generation) -> AsyncGenerator[Tokens, None]:
        """Yield a sequence's tokens as they come; the last item has a finish reason. Raises a ``WarmpathError``."""
        loop = asyncio.get_running_loop()
        stream, ready = TokenStream(generation.interval_s), asyncio.Queue[EngineOutput]()

        def deliver(outputs: Sequence[EngineOutput]) -> None:
            for output in filter(None, map(stream.push, outputs)):
                loop.call_soon_threadsafe(ready.put_nowait, output)

        request = EngineRequest(
            request_id=generation.request_id,
            token_ids=generation.token_ids,
            scope=generation.scope,
            root=generation.root,
            sampling=generation.sampling,
            block_hashes=generation.block_hashes,
            tenant=generation.tenant,
            save=generation.save,
            store_kv=generation.store_kv,
        )
        began_s = time.perf_counter()
        work, first_s, ended = Work(len(generation.token_ids)), 0.0, False
        try:
            await self.adapters.submit(request, generation.lora_path, deliver)
            while not ended:
                output = await ready.get()
                if output.finish_reason not in (None, "stop", "length"):
                    raise GenerationFailed(output.error or "The engine failed this request.")
                now_s = time.perf_counter()
                if output.cached_tokens is not None:
                    first_s = now_s
                    work.reused_tokens = output.cached_tokens
                    work.prefill_s = max(0.0, now_s - began_s - output.queue_s)
                    self.work[generation.request_id] = work
                work.generated_tokens += len(output.token_ids)
                work.generation_s = now_s - first_s
                ended = output.finish_reason is not None
                yield Tokens(output.token_ids, output.cached_tokens, output.finish_reason, output.save)
        except (EngineError, ValueError) as error:
            raise InvalidRequest(str(error)) from error
        finally:
            if not ended:
                self._engine.cancel(generation.request_id)
