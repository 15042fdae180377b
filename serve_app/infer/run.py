"""Runs a batch file on an engine in this process, with the server's preparation and answers."""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from router.protocol.block_hash import common_tokens
from serve_app.api.format import AnswerHead, ErrorAnswer
from serve_app.api.request import ChatRequest, ignored_fields
from serve_app.batch.batch_file import APIS, BatchRequest
from serve_app.batch.order import LANES, LineRunner, as_given, beginnings, grouped
from serve_app.cache_misses.reasons import SeenPrompt, explain, is_miss
from serve_app.cache_misses.rules import REMEDIES, MissReason
from serve_app.checkpoints.checkpoint import CheckpointInfo
from serve_app.checkpoints.limits import max_model_len
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import Engine, EngineError, EngineOutput, EngineRequest, TakeAtOnce
from serve_app.engine.token_channel import TokenStream
from serve_app.errors import InvalidRequest, WarmpathError
from serve_app.fairness.queue import LoopTurns, WaitingLine
from serve_app.fairness.shares import Budget, Shares
from serve_app.generation.answer import answer_pieces, raise_for, told_ids
from serve_app.generation.prepare import Limits, Preparer
from serve_app.generation.request_usage import RequestUsage, save_warning
from serve_app.generation.tool_calls.call_reader import WholeChoice
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.infer.answered import AnsweredLine
from serve_app.prompts.registry import Prompts
from serve_app.replica.adapter_loader import ReplicaAdapters
from serve_app.replica.engine_factory import make_engine
from serve_app.replica.grammars import ReplicaMatchers
from serve_app.tenants import Tenants, load_secret
from serve_app.tokenization.tokenizer import PromptTokenizer

SEEN_PROMPTS = 1024
"""Earlier prompts that a miss is compared with."""
_SAVED = {"saved": "its system prompt was saved", "present": "its system prompt was saved already"}


@dataclass(frozen=True, slots=True)
class InferJob:
    """A file's requests, ``at_once`` of them at a time; ``formatted``: their formatted prompts are told."""

    requests: Sequence[BatchRequest]
    at_once: int
    formatted: bool = False


async def run_batch(
    config: AppConfig,
    info: CheckpointInfo,
    jobs: Sequence[InferJob],
    on_answer: Callable[[int, int, AnsweredLine], None],
    *,
    keep_order: bool = False,
    explains: bool = False,
) -> None:
    """Answer every request of one file after the other, even after failed ones, on one engine.

    ``on_answer`` gets the numbers of the file and of the request, and each answer when it is ready. ``keep_order``: in
    the order of the file, else in the one that computes least. ``explains``: the reasons of misses are told.
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
        batch = _Batch(config, info, tokenizer, engine, adapters, explains)
        for at, job in enumerate(jobs):

            async def answer(number: int, at: int = at, job: InferJob = job) -> None:
                on_answer(at, number, await batch.answer(number, job.requests[number], formatted=job.formatted))

            await run_job(job, answer, keep_order=keep_order)
    finally:
        await asyncio.to_thread(engine.stop)


async def run_job(job: InferJob, answer: Callable[[int], Awaitable[None]], *, keep_order: bool) -> None:
    """Call ``answer`` with the number of each request of a file."""
    count = len(job.requests)
    groups = as_given(count) if keep_order else grouped([beginnings(request.body) for request in job.requests])
    await LineRunner(answer, lambda: job.at_once, lambda: LANES).run(groups)


class _Batch:
    """One run, in the place of both the ingress and the replica."""

    def __init__(
        self,
        config: AppConfig,
        info: CheckpointInfo,
        tokenizer: PromptTokenizer,
        engine: Engine,
        adapters: ReplicaAdapters,
        explains: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._block_size = config.block_size
        self._explains = explains
        self._seen: deque[SeenPrompt] = deque(maxlen=SEEN_PROMPTS)
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
        self._turns = LoopTurns()
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

    async def answer(self, index: int, request: BatchRequest, *, formatted: bool) -> AnsweredLine:
        """Return a request's answer or its error."""
        answer_id = uuid.uuid4().hex
        answered, begun_s = AnsweredLine(line={}), time.perf_counter()
        try:
            answer = ErrorAnswer(200, await self._answer_body(index, request, answer_id, answered, formatted=formatted))
        except WarmpathError as error:
            answer = APIS[request.url][1]().error(error, answer_id)
        answered.total_s = time.perf_counter() - begun_s
        answered.line = request.response(answer, answer_id)
        return answered

    async def _answer_body(
        self, index: int, request: BatchRequest, answer_id: str, answered: AnsweredLine, *, formatted: bool
    ) -> dict[str, Any]:
        # The request's index is its seed, so that a file gives the same answers again.
        parsed = self._readers.checked(request.parse_body(self._model, seed=index))
        if formatted and isinstance(parsed, ChatRequest):
            prompts = self._preparer.prompts
            rendered = await prompts.formatted(parsed, await prompts.scope(parsed, self._tenant))
            answered.formatted_request, answered.formatted_system_prompt = rendered.text, rendered.system_text
        place = await self._places.enter(self._tenant.name, parsed.choices)
        try:
            generations = await self._preparer.prepare(parsed, self._tenant, answer_id)
            generations = self._readers.after_reasoning(parsed, generations)
            usage = RequestUsage(parsed, generations)
            choices = [WholeChoice(tells_logprobs=parsed.logprobs is not None) for _ in generations]
            pieces = answer_pieces(generations, self, self._readers.of(parsed), place, self._turns)
            begun_s, first_s = time.perf_counter(), None
            async with aclosing(pieces):
                async for piece in pieces:
                    usage.add(piece)
                    choices[piece.index].add(piece)
                    if first_s is None and piece.first is not None:
                        first_s = time.perf_counter()
                        answered.save = _SAVED.get(piece.first.save.outcome, "") if piece.first.save is not None else ""
                        answered.why = self._why(generations[piece.index], piece.first.cached_tokens)
            if first_s is not None:
                answered.prefill_s, answered.decode_s = first_s - begun_s, time.perf_counter() - first_s
        finally:
            place.give_back()
        warnings = save_warning(usage.save, usage.asked_by), ignored_fields(parsed.unknown), generations[0].warning
        answered.warning = "; ".join(filter(None, warnings))
        total = usage.total()
        answered.prompt_tokens, answered.cached_tokens = total.prompt_tokens, total.cached_tokens
        answered.generated_tokens, answered.adapter = total.completion_tokens, parsed.lora_name or ""
        head = AnswerHead(
            answer_id,
            int(time.time()),
            parsed.answering_model,
            repeated=parsed.repeated,
            token_ids=told_ids(parsed, generations),
            shows_reasoning=parsed.include_reasoning,
        )
        return APIS[request.url][1]().whole(head, [choice.choice() for choice in choices], total)

    def _why(self, generation: EngineRequest, cached_tokens: int) -> str:
        """Return the reason of a miss, "" for a hit, and remember the prompt."""
        if not self._explains:
            return ""
        prompt, earlier = (
            SeenPrompt(generation.identity, generation.scope, generation.system_chars, 0.0),
            [*self._seen],
        )
        self._seen.append(prompt)
        reason: MissReason | None = None
        if is_miss(len(prompt.ids), cached_tokens):
            reason = explain(prompt, cached_tokens, earlier, self._tokenizer.text_of).reason
        if not cached_tokens and reason in (None, "never_seen"):  # too short for that explanation
            alike = {seen.cache for seen in earlier if common_tokens(prompt.ids, seen.ids) >= self._block_size}
            reason = "never_seen" if not alike else "evicted" if prompt.cache in alike else "adapter"
        return f"{reason}: {REMEDIES[reason]}" if reason is not None else ""

    async def generate(
        self, generation: EngineRequest, *, at_once: TakeAtOnce | None = None
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
