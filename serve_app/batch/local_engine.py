"""A source of tokens that is an engine in this process, with its adapters; what a replica and a router are to a server.

Owns the engine's life here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self

from serve_app.checkpoints.checkpoint import CheckpointInfo
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import Engine, EngineError, EngineOutput, EngineRequest
from serve_app.errors import GenerationFailed, InvalidRequest
from serve_app.generation.generation import Generation, Tokens
from serve_app.replica.adapter_loader import ReplicaAdapters
from serve_app.replica.engine_factory import make_engine
from serve_app.replica.grammars import ReplicaMatchers
from serve_app.replica.running_calls import TokenStream


class LocalEngine:
    """A running engine."""

    def __init__(self, engine: Engine, adapters: ReplicaAdapters, matchers: ReplicaMatchers) -> None:
        self._engine = engine
        self._matchers = matchers
        self.adapters = adapters

    @classmethod
    @asynccontextmanager
    async def running(cls, config: AppConfig, info: CheckpointInfo) -> AsyncIterator[Self]:
        """Load the model and its adapters, and stop the engine in the end. Raises ValueError for what cannot be run."""
        engine = await asyncio.to_thread(make_engine, config, info, lambda _: None)
        try:
            adapters = ReplicaAdapters(config, engine)
            await adapters.preload()
            engine.start()
            yield cls(engine, adapters, ReplicaMatchers(config, info))
        finally:
            await asyncio.to_thread(engine.stop)

    async def generate(self, generation: Generation) -> AsyncGenerator[Tokens, None]:
        """Yield a sequence's tokens as they come; the last item has a finish reason. Raises a ``WarmpathError``."""
        loop = asyncio.get_running_loop()
        stream, ready = TokenStream(generation.interval_s), asyncio.Queue[EngineOutput]()

        def deliver(outputs: Sequence[EngineOutput]) -> None:
            for output in filter(None, map(stream.push, outputs)):
                loop.call_soon_threadsafe(ready.put_nowait, output)

        grammar, tenant = generation.grammar, generation.tenant
        ended = False
        try:
            request = EngineRequest(
                request_id=generation.request_id,
                token_ids=generation.token_ids,
                scope=generation.scope,
                root=generation.root,
                sampling=generation.sampling,
                block_hashes=generation.block_hashes,
                tenant=tenant,
                saves=generation.saves,
                store_kv=generation.store_kv,
                matcher=await self._matchers.matcher(grammar, tenant) if grammar else None,
            )
            await self.adapters.submit(request, generation.lora_path, deliver)
            while not ended:
                output = await ready.get()
                if output.finish_reason not in (None, "stop", "length"):
                    raise GenerationFailed(output.error or "The engine failed this request.")
                ended = output.finish_reason is not None
                yield Tokens(output.token_ids, output.cached_tokens, output.finish_reason, output.save, output.logprobs)
        except (EngineError, ValueError) as error:
            raise InvalidRequest(str(error)) from error
        finally:
            if not ended:
                self._engine.cancel(generation.request_id)
