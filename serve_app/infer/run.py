"""Runs a batch file on an engine in this process, with the server's preparation and answers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from router.core import RoutingCore
from router.protocol.block_hash import common_tokens
from router.settings import RouterSettings
from serve_app.api.format import AnswerHead, ErrorAnswer
from serve_app.api.request import ChatRequest, ignored_fields
from serve_app.batch.batch_file import APIS, BatchRequest
from serve_app.batch.order import LANES, LineRunner, as_given, beginnings, grouped
from serve_app.cache_misses.reasons import SeenPrompt, explain, is_miss
from serve_app.cache_misses.rules import REMEDIES, MissReason
from serve_app.checkpoints.checkpoint import CheckpointInfo
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import Engine, EngineError, EngineOutput, EngineRequest, TakeAtOnce
from serve_app.engine.token_channel import TokenStream
from serve_app.errors import InvalidRequest, WarmpathError
from serve_app.fairness.queue import FairWorkers
from serve_app.generation.answer import answer_pieces, raise_for, told_ids
from serve_app.generation.request_usage import RequestUsage, save_warning
from serve_app.generation.tool_calls.call_reader import WholeChoice
from serve_app.infer.answered import AnsweredLine
from serve_app.ingress.address import Address
from serve_app.ingress.assembly import make_address
from serve_app.ingress.broadcast import Alone
from serve_app.ingress.outside import LoadedModel
from serve_app.replica.adapter_loader import ReplicaAdapters
from serve_app.replica.engine_factory import make_engine
from serve_app.replica.grammars import ReplicaMatchers
from serve_app.stored.database import StorageLimits
from serve_app.tenants import load_secret

MOST_AT_ONCE = 1 << 20
"""Requests of a file that wait: a job has fewer at once."""
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
    outside = InThisProcess(info, await asyncio.to_thread(make_engine, config, info, lambda _: None), config)
    try:
        await outside.start()
        # Who may ask a server, and what it writes for its operator, is not a file's.
        apart = {"usage_file": None, "require_tenants": None, "max_queued_requests": MOST_AT_ONCE}
        alone = config.model_copy(update=apart)
        batch = _Batch(await make_address(alone, outside), explains=explains)
        for at, job in enumerate(jobs):

            async def answer(number: int, at: int = at, job: InferJob = job) -> None:
                on_answer(at, number, await batch.answer(number, job.requests[number], formatted=job.formatted))

            await run_job(job, answer, keep_order=keep_order)
    finally:
        await asyncio.to_thread(outside.engine.stop)


async def run_job(job: InferJob, answer: Callable[[int], Awaitable[None]], *, keep_order: bool) -> None:
    """Call ``answer`` with the number of each request of a file."""
    count = len(job.requests)
    groups = as_given(count) if keep_order else grouped([beginnings(request.body) for request in job.requests])
    await LineRunner(answer, lambda: job.at_once, lambda: LANES).run(groups)


class InThisProcess:
    """What an address reaches where one engine in its own process answers: ``Outside``, and its ``TokenSource``."""

    name = "infer"

    def __init__(self, info: CheckpointInfo, engine: Engine, config: AppConfig) -> None:
        self.engine = engine
        self._info = info
        self._adapters = ReplicaAdapters(config, engine)
        self._matchers = ReplicaMatchers(config, info)

    async def start(self) -> None:
        """Load the adapters of the settings, and start the engine. Raises AdapterError."""
        await self._adapters.preload()
        self.engine.start()

    def close(self) -> None:
        """Do nothing: tokens come by calls."""

    def secret(self, config: AppConfig) -> bytes:
        """See ``Outside``."""
        return load_secret(secret_file=config.secret_file)

    def tracer(self, config: AppConfig) -> None:
        """Return None: nothing is traced."""

    async def database(self, config: AppConfig, bounds: StorageLimits) -> None:
        """Return None: nothing is stored."""

    def load(self, config: AppConfig, workers: FairWorkers) -> LoadedModel:
        """See ``Outside``."""
        return LoadedModel.load(config, self._info, workers)

    def broadcast(self, config: AppConfig, model: str, label: str) -> Alone:
        """See ``Outside``."""
        return Alone(label)

    def core(self, config: AppConfig) -> RoutingCore:
        """See ``Outside``; no request passes it."""
        return RoutingCore(self.name, RouterSettings.from_json(config.routing()))

    def source(self, config: AppConfig, *_: object) -> InThisProcess:
        """See ``Outside``."""
        return self

    async def generate(
        self, generation: EngineRequest, avoid: tuple[str, ...] = (), *, at_once: TakeAtOnce | None = None
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
                self.engine.cancel(generation.request_id)


class _Batch:
    """One run: what the ingress does for a request, with what is told of a file's."""

    def __init__(self, address: Address, *, explains: bool) -> None:
        self._model, self._turns = address.first, address.workers.loop
        self._preparer, self._readers = self._model.preparer, self._model.readers
        self._tenant = address.tenants.authenticate(None)
        self._explains = explains
        self._seen: deque[SeenPrompt] = deque(maxlen=SEEN_PROMPTS)

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
        parsed = self._readers.checked(request.parse_body(self._model.name, seed=index))
        if formatted and isinstance(parsed, ChatRequest):
            prompts = self._preparer.prompts
            rendered = await prompts.formatted(parsed, await prompts.scope(parsed, self._tenant))
            answered.formatted_request, answered.formatted_system_prompt = rendered.text, rendered.system_text
        with self._model.front_door.arrive(self._tenant.name) as arrival:
            await arrival.turn(parsed.choices)
            generations = await self._preparer.prepare(parsed, self._tenant, answer_id)
            generations = self._readers.after_reasoning(parsed, generations)
            place, allowance = arrival.hand_over(), arrival.allowance
        usage = RequestUsage(parsed, generations)
        choices = [WholeChoice(tells_logprobs=parsed.logprobs is not None) for _ in generations]
        pieces = answer_pieces(generations, self._model.source, self._readers.of(parsed), place, self._turns)
        begun_s, first_s = time.perf_counter(), None
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    usage.add(piece)
                    choices[piece.index].add(piece)
                    if first_s is None and piece.first is not None:
                        first_s = time.perf_counter()
                        answered.save = _SAVED.get(piece.first.save.outcome, "") if piece.first.save is not None else ""
                        answered.why = self._why(generations[piece.index], piece.first.cached_tokens)
        finally:
            place.give_back()
            allowance.end()
        if first_s is not None:
            answered.prefill_s, answered.decode_s = first_s - begun_s, time.perf_counter() - first_s
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
            reason = explain(prompt, cached_tokens, earlier, self._model.tokenizer.text_of).reason
        if not cached_tokens and reason in (None, "never_seen"):  # too short for that explanation
            alike = {
                seen.cache for seen in earlier if common_tokens(prompt.ids, seen.ids) >= self._model.config.block_size
            }
            reason = "never_seen" if not alike else "evicted" if prompt.cache in alike else "adapter"
        return f"{reason}: {REMEDIES[reason]}" if reason is not None else ""
