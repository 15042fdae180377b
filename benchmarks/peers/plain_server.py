"""One engine as a plain OpenAI server, without Ray and without our router: what other routers are put in front of.

Same tokenizer, request parsing, engine and answers as a replica's; its answers to one model and one open tenant.
`python -m benchmarks.peers.plain_server --port P --config JSON`
"""

# No `from __future__ import annotations`: FastAPI resolves the routes' annotations inside `application`.
import argparse
import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

import uvicorn
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serve_app.api.format import AnswerFormat
from serve_app.api.openai.request import parse_chat, parse_completion
from serve_app.api.openai.response import ChatFormat, CompletionFormat, model_body, models_body
from serve_app.api.request import GenerateRequest
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.limits import max_model_len
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import Engine, EngineError, EngineOutput, EngineRequest, QueueFull
from serve_app.errors import GenerationFailed, InvalidRequest, RateLimited, WarmpathError
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.shares import Shares
from serve_app.generation.generation import Generation, Tokens
from serve_app.generation.prepare import Limits, Preparer
from serve_app.generation.tool_calls.tool_calls import tool_calls_of
from serve_app.ingress.completions import Completions
from serve_app.ingress.http import error_headers, json_response, read_body
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.stopping import Stopping
from serve_app.replica.engine_factory import make_engine
from serve_app.tenants.tenants import Tenants
from serve_app.tenants.usage import UsageTable
from serve_app.tokenization.tokenizer import PromptTokenizer


class LocalEngine:
    """Streams generations from an engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, generation: Generation) -> AsyncGenerator[Tokens, None]:
        """Yield the sequence's tokens as they come. Raises a ``WarmpathError`` when it cannot be done."""
        loop = asyncio.get_running_loop()
        outputs: deque[EngineOutput] = deque()
        ready = asyncio.Event()

        def arrived(found: Sequence[EngineOutput]) -> None:
            outputs.extend(found)
            ready.set()

        def take(found: Sequence[EngineOutput]) -> None:
            loop.call_soon_threadsafe(arrived, found)

        request = EngineRequest(
            request_id=generation.request_id,
            token_ids=generation.token_ids,
            scope=generation.scope,
            root=generation.root,
            sampling=generation.sampling,
            block_hashes=generation.block_hashes,
        )
        try:
            self._engine.submit(request, take)
        except QueueFull as error:
            raise RateLimited("The queue is full; send the request again later.", retry_after_s=1.0) from error
        except (EngineError, ValueError) as error:
            raise InvalidRequest(str(error)) from error
        ended = False
        try:
            while not ended:
                await ready.wait()
                ready.clear()
                while outputs:
                    output = outputs.popleft()
                    ended = output.finish_reason is not None
                    if output.finish_reason == "error":
                        raise GenerationFailed(output.error)
                    yield Tokens(output.token_ids, output.cached_tokens, output.finish_reason, output.save)
        finally:
            if not ended:
                self._engine.cancel(generation.request_id)


def application(config: AppConfig) -> FastAPI:
    """Load the engine and return the server around it."""
    path = resolve_model(config.model)
    info = load_checkpoint_info(path)
    tokenizer = PromptTokenizer(path, cache_bytes=config.tokenizer_cache_bytes, block_size=config.block_size)
    engine = make_engine(config, info, lambda events: None)
    engine.start()
    secret = b"\0" * 32  # one tenant, one process, loopback: nothing here is private
    tenants = Tenants((), secret)
    preparer = Preparer(
        info,
        tokenizer,
        tenants,
        secret,
        AdapterRegistry(config.model_name),
        Limits(max_model_len(config, info), config.default_max_tokens),
    )
    front_door = FrontDoor(
        Shares({}), places=lambda: config.max_num_seqs + config.max_waiting_requests, max_waiting=512, max_bytes=1 << 30
    )
    completions = Completions(
        preparer,
        LocalEngine(engine),
        tokenizer,
        tool_calls_of(tokenizer, config.tool_parser),
        IngressMetrics(),
        UsageTable(),
        front_door,
        Stopping(),
        request_timeout_s=config.request_timeout_s,
    )
    model = model_body(config.model_name, int(time.time()), max_model_len(config, info))
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def answer(request: Request, parse: Callable[[bytes], GenerateRequest], shape: AnswerFormat) -> Response:
        arrived_s = time.perf_counter()
        try:
            tenant = tenants.authenticate(None)
            with front_door.arrive(tenant.name) as arrival:
                wanted = parse(await read_body(request, config.max_body_bytes, arrival.grow))
                return await completions.respond(request, wanted, shape, tenant, arrival, arrived_s)
        except WarmpathError as error:
            shown = shape.error(error, "")
            return json_response(shown.body, shown.status, error_headers(error))
        except ClientDisconnect:
            return Response(status_code=499)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, parse_chat, ChatFormat())

    @app.post("/v1/completions")
    async def text(request: Request) -> Response:
        return await answer(request, parse_completion, CompletionFormat())

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response(models_body([model]))

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if engine.healthy() else 503)

    return app


def main() -> None:
    """Serve until interrupted, on loopback only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--config", required=True, help="settings of a deployment, as JSON")
    arguments = parser.parse_args()
    app = application(AppConfig.model_validate(json.loads(arguments.config)))
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
