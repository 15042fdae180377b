"""Runs a batch file on an engine in this process, with the server's preparation and answers."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import structs

from serve_app.api.format import AnswerHead, ErrorAnswer
from serve_app.api.request import ignored_fields
from serve_app.batch.batch_file import APIS, BatchRequest
from serve_app.checkpoints.checkpoint import CheckpointInfo
from serve_app.checkpoints.limits import max_model_len
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import Engine, EngineError, EngineOutput, EngineRequest
from serve_app.errors import InvalidRequest, WarmpathError
from serve_app.fairness.queue import WaitingLine
from serve_app.fairness.shares import Budget, Shares
from serve_app.generation.answer import TakeOutput, answer_pieces, raise_for, told_ids
from serve_app.generation.prepare import Limits, Preparer
from serve_app.generation.request_usage import RequestUsage, save_warning
from serve_app.generation.tool_calls.call_reader import WholeChoice
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.prompts.registry import Prompts
from serve_app.replica.adapter_loader import ReplicaAdapters
from serve_app.replica.engine_factory import make_engine
from serve_app.replica.grammars import ReplicaMatchers
from serve_app.replica.token_channel import TokenStream
from serve_app.tenants import Tenants, load_secret
from serve_app.tokenization.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)


async def run_batch(
    config: AppConfig,
    info: CheckpointInfo,
    requests: Sequence[BatchRequest],
    on_response: Callable[[dict[str, Any]], None],
) -> None:
    """Answer every request, even after failed ones; ``on_response`` gets each output line when it is ready.

    Raises ValueError for unusable settings, adapters or models.
    """
    tokenizer = await asyncio.to_thread(
        PromptTokenizer, info.path, cache_bytes=config.tokenizer_cache_bytes, block_size=config.block_size
    )
    engine = await asyncio.to_thread(make_engine, config, info, lambda _: None)
    try:
        adapters = ReplicaAdapters(config, engine)
        await adapters.preload()
        engine.start()
        batch = _Batch(config, info, tokenizer, engine, adapters)
        answers = [asyncio.ensure_future(batch.answer(index, request)) for index, request in enumerate(requests)]
        for answer in asyncio.as_completed(answers):
            on_response(await answer)
    finally:
        await asyncio.to_thread(engine.stop)


class _Batch:
    """One run, in the place of both the ingress and the replica."""

    def __init__(
        self,
        config: AppConfig,
        info: CheckpointInfo,
        tokenizer: PromptTokenizer,
        engine: Engine,
        adapters: ReplicaAdapters,
    ) -> None:
        self._model = config.model_name
        self._engine = engine
        self._adapters = adapters
        self._matchers = ReplicaMatchers(config, info)
        self._readers = AnswerReaders(
            tokenizer, config.tool_parser, config.reasoning_parser, stop_in_reasoning=config.stop_in_reasoning
        )
        secret = load_secret(secret_file=config.secret_file)
        tenants = Tenants((), secret)
        self._tenant = tenants.authenticate(None)
        at_once = min(config.max_num_seqs, config.max_waiting_requests)
        self._places = WaitingLine(Budget(Shares({}), lambda: at_once))
        prompts = Prompts.of(config.public_prompts, config.prompts_dir)
        prompts.install(tokenizer)
        self._preparer = Preparer(
            info,
            tokenizer,
            tenants,
            secret,
            adapters.registry,
            Limits(max_model_len(config, info), config.default_max_tokens, config.save_ttl_s),
            prompts,
            simulated=config.engine_traits.simulated,
        )

    async def answer(self, index: int, request: BatchRequest) -> dict[str, Any]:
        """Return a request's output line: its answer or its error."""
        answer_id = uuid.uuid4().hex
        try:
            answer = ErrorAnswer(200, await self._answer_body(index, request, answer_id))
        except WarmpathError as error:
            answer = APIS[request.url][1]().error(error, answer_id)
        return request.response(answer, answer_id)

    async def _answer_body(self, index: int, request: BatchRequest, answer_id: str) -> dict[str, Any]:
        # The request's index is its seed, so that a file gives the same answers again.
        wanted = self._readers.checked(request.parse_body(self._model, seed=index))
        place = await self._places.enter(self._tenant.name, wanted.choices)
        try:
            generations = await self._preparer.prepare(wanted, self._tenant, answer_id)
            generations = self._readers.after_reasoning(wanted, generations)
            usage = RequestUsage(wanted, generations)
            choices = [WholeChoice(tells_logprobs=wanted.logprobs is not None) for _ in generations]
            pieces = answer_pieces(generations, self, self._readers.of(wanted), place)
            async with aclosing(pieces):
                async for piece in pieces:
                    usage.add(piece)
                    choices[piece.index].add(piece)
        finally:
            place.give_back()
        warnings = save_warning(usage.save, usage.asked_by), ignored_fields(wanted.unknown), generations[0].warning
        for warning in filter(None, warnings):
            logger.warning("%s: %s", request.custom_id, warning)
        head = AnswerHead(
            answer_id,
            int(time.time()),
            wanted.answering_model,
            repeated=wanted.repeated,
            token_ids=told_ids(wanted, generations),
            shows_reasoning=wanted.include_reasoning,
        )
        return APIS[request.url][1]().whole(head, [choice.choice() for choice in choices], usage.total())

    async def generate(
        self, generation: EngineRequest, *, take: TakeOutput | None = None
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield a request's outputs as they arrive; the last has a finish reason. Raises a ``WarmpathError``."""
        loop = asyncio.get_running_loop()
        stream, ready = TokenStream(generation.interval_s), asyncio.Queue[EngineOutput]()

        def deliver(outputs: Sequence[EngineOutput]) -> None:
            for output in filter(None, map(stream.push, outputs)):
                loop.call_soon_threadsafe(ready.put_nowait, output)

        grammar = generation.grammar
        ended = False
        try:
            if grammar:
                matcher = await self._matchers.matcher(grammar, generation.tenant)
                generation = structs.replace(generation, matcher=matcher)
            await self._adapters.submit(generation, deliver)
            while not ended:
                output = await ready.get()
                raise_for(output, generation.grammar_field)
                ended = output.finish_reason is not None
                yield output
        except (EngineError, ValueError) as error:
            raise InvalidRequest(str(error)) from error
        finally:
            if not ended:
                self._engine.cancel(generation.request_id)
