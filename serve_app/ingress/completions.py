"""The work of a completion: pieces of text become a whole answer or server-sent events, counted and timed."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api import sse
from serve_app.api.format import AnswerFormat, AnswerHead
from serve_app.api.request import ChatRequest, GenerateRequest
from serve_app.api.tool_calls import NO_TOOLS
from serve_app.api.unknown import UnknownField, ignored_fields
from serve_app.engine.protocol import SaveResult
from serve_app.errors import GenerationFailed, WarmpathError
from serve_app.fairness.front_door import Arrival, FrontDoor
from serve_app.fairness.rate_limits import Allowance
from serve_app.generation.answer import Piece, TokenSource, answer_pieces
from serve_app.generation.generation import Generation
from serve_app.generation.prepare import Preparer
from serve_app.generation.request_usage import RequestUsage
from serve_app.generation.saves import SAVE_FIELD, save_warning
from serve_app.generation.tool_calls.forced import forced_calls
from serve_app.generation.tool_calls.pieces import WholeChoice
from serve_app.generation.tool_calls.tool_calls import ToolCalls
from serve_app.ingress.http import TimedStream, json_response, until_disconnect
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.stopping import LAST_EVENT_S, Stopping
from serve_app.misses.detector import MissDetector
from serve_app.prompts.traffic import PromptTraffic, Use
from serve_app.tenants.tenants import Tenant
from serve_app.tenants.usage import UsageTable
from serve_app.tokenization.tokenizer import PromptTokenizer
from serve_app.usage.ledger import Ledger

logger = logging.getLogger(__name__)

PROMPT_HEADER = "x-warmpath-prompt"
"""Of an answer: the version of the registered prompt that it begins with."""


class Completions:
    """Answers whatever generates text, in the format of any API.

    ``request_timeout_s`` may be set; a request has the time that there was when it came.
    """

    def __init__(
        self,
        preparer: Preparer,
        source: TokenSource,
        tokenizer: PromptTokenizer,
        tool_calls: ToolCalls,
        metrics: IngressMetrics,
        traffic: UsageTable,
        front_door: FrontDoor,
        stopping: Stopping,
        *,
        request_timeout_s: float,
        ledger: Ledger | None = None,
        prompts: PromptTraffic | None = None,
        misses: MissDetector | None = None,
    ) -> None:
        self._prompts = prompts or PromptTraffic()
        self._misses = misses
        self._ledger = ledger or Ledger(None, 0)
        self._preparer = preparer
        self._source = source
        self._tokenizer = tokenizer
        self._tool_calls = tool_calls
        self._metrics = metrics
        self._traffic = traffic
        self._front_door = front_door
        self._stopping = stopping
        self.request_timeout_s = request_timeout_s

    async def respond(
        self,
        request: Request,
        wanted: GenerateRequest,
        answer_format: AnswerFormat,
        tenant: Tenant,
        arrival: Arrival,
        arrived_s: float,
    ) -> Response:
        """Return the answer, whole or as a stream that has its first piece already.

        Raises a ``WarmpathError`` for whatever fails before that piece, ClientDisconnect when the client leaves.
        """
        use, repeated = (wanted.tool_use, wanted.repeated) if isinstance(wanted, ChatRequest) else (NO_TOOLS, {})
        self._tool_calls.check(use)
        if use.must_call:
            wanted = replace(wanted, grammar=forced_calls(use))
        shown = self._tool_calls.shown_tokens(use)
        # Internal ids are ours: two clients may send the same x-request-id.
        answer_id = uuid.uuid4().hex
        body_bytes, timeout_s, allowance = arrival.body_bytes, self.request_timeout_s, arrival.allowance
        begun = self._begin(wanted, tenant, arrival, answer_id, arrived_s, timeout_s)
        generations = await until_disconnect(request, begun)
        place = arrival.hand_over()
        try:
            decoder, reading = partial(self._tokenizer.decoder, shown), self._tool_calls.reading(use)
            include_stop = wanted.include_stop_str_in_output
            pieces = answer_pieces(
                generations, self._source, decoder, wanted.stop, place, reading, include_stop=include_stop
            )
            usage, tells = RequestUsage(wanted.n, generations), wanted.logprobs is not None
            pieces = self._timed(
                pieces, generations, wanted, tenant, arrived_s, timeout_s, body_bytes, allowance, usage
            )
            head = AnswerHead(answer_id, int(time.time()), wanted.answering_model, wanted.include_usage, repeated)
            answer = _Answer(answer_format, head, pieces, len(generations), usage, tells)
            ref = generations[0].prompt_ref
            version = {PROMPT_HEADER: ref} if ref else {}
            if not wanted.stream:
                whole = await until_disconnect(request, _collect(answer, wanted.unknown))
                whole.headers.update(version)
                return whole
            try:
                # Errors before the first token still have a status of their own.
                first = await until_disconnect(request, anext(pieces))
            except BaseException:
                await pieces.aclose()
                raise
        except BaseException:
            place.give_back()  # pieces that nobody asked for have not begun, and give nothing back
            allowance.end()
            raise
        headers = {**sse.HEADERS, **version, **warning_headers(first.save, wanted.unknown, usage.asked_by)}
        # What ends an answer at its time is sent after that time.
        deadline_s = arrived_s + timeout_s + LAST_EVENT_S
        return TimedStream(self._events(answer, first), headers, media_type=sse.CONTENT_TYPE, deadline_s=deadline_s)

    async def _begin(
        self,
        wanted: GenerateRequest,
        tenant: Tenant,
        arrival: Arrival,
        answer_id: str,
        arrived_s: float,
        timeout_s: float,
    ) -> list[Generation]:
        """Wait for the request's turn, then make its generations, and reserve their tokens.

        Raises a WarmpathError when there is no time left, or no token.
        """
        deadline_s = arrived_s + timeout_s
        try:
            async with self._stopping.limit(deadline_s - time.perf_counter()):
                await arrival.turn(wanted.choices)
                generations = await self._preparer.prepare(wanted, tenant, answer_id, deadline_s=deadline_s)
        except TimeoutError as error:
            raise self._out_of_time(timeout_s) from error
        prompt_tokens = sum(len(generation.token_ids) for generation in generations[:: wanted.n])
        arrival.allowance.reserve(prompt_tokens, sum(each.sampling.max_tokens for each in generations))
        return generations

    async def _timed(
        self,
        pieces: AsyncGenerator[Piece, None],
        generations: list[Generation],
        wanted: GenerateRequest,
        tenant: Tenant,
        arrived_s: float,
        timeout_s: float,
        body_bytes: int,
        allowance: Allowance,
        usage: RequestUsage,
    ) -> AsyncGenerator[Piece, None]:
        """Pass pieces on, counting; raises a WarmpathError when there is no time left for more."""
        metrics, name = self._metrics, tenant.name
        uncached_tokens = output_tokens = 0
        ref = generations[0].prompt_ref
        used = (name, wanted.answering_model, ref)
        refused = False
        deadline_s = arrived_s + timeout_s
        last_s: dict[int, float] = {}
        metrics.in_flight.inc()
        try:
            async with aclosing(pieces):
                while True:
                    try:
                        async with self._stopping.limit(deadline_s - time.perf_counter()):
                            piece = await anext(pieces)
                    except StopAsyncIteration:
                        return
                    except TimeoutError as error:
                        raise self._out_of_time(timeout_s) from error
                    now_s = time.perf_counter()
                    allowance.generated(piece.new_tokens)
                    output_tokens += piece.new_tokens
                    if piece.cached_tokens is not None:
                        generation = generations[piece.index]
                        prompt_tokens = len(generation.token_ids)
                        uncached_tokens += prompt_tokens - piece.cached_tokens
                        metrics.ttft_s.labels(name).observe(now_s - arrived_s)
                        metrics.prompt_tokens.labels(name).inc(prompt_tokens)
                        metrics.cached_tokens.labels(name).inc(piece.cached_tokens)
                        self._traffic.add(name, generation.placement_key, prompt_tokens, piece.cached_tokens)
                        if piece.index % wanted.n == 0:
                            written_tokens = self._ledger.prompt(
                                *used, prompt_tokens, piece.cached_tokens, stored=generation.store_kv
                            )
                            metrics.written_tokens.labels(name).inc(written_tokens)
                            if ref:
                                self._prompts.add(ref, prompt_tokens, piece.cached_tokens, now_s - arrived_s)
                                if generation.store_kv:
                                    self._prompts.add_use(ref, use_of(wanted, name), public=generation.public)
                    elif piece.new_tokens and piece.index in last_s:
                        metrics.inter_token_s.labels(name).observe((now_s - last_s[piece.index]) / piece.new_tokens)
                    last_s[piece.index] = now_s
                    metrics.completion_tokens.labels(name).inc(piece.new_tokens)
                    yield piece
                    # Not before: nobody's first token waits for an explanation.
                    if self._misses and piece.cached_tokens is not None and piece.index % wanted.n == 0:
                        generation = generations[piece.index]
                        miss = self._misses.observe(generation, piece.cached_tokens, arrived_s, now_s)
                        if miss is not None and wanted.cache_diagnostics and piece.index == 0:
                            usage.miss = miss
        except WarmpathError:
            refused = not last_s
            raise
        finally:
            metrics.in_flight.dec()
            allowance.end(refused=refused)
            if last_s:  # where nothing was answered, what it cost is not known, and it was not free
                self._ledger.answer(*used, output_tokens)
                self._front_door.learn(name, body_bytes, uncached_tokens)

    def _out_of_time(self, timeout_s: float) -> WarmpathError:
        if self._stopping.over:
            return self._stopping.broken_off()
        return GenerationFailed(f"The answer took over {timeout_s:.0f} s; ask for fewer tokens.", code="timeout")

    async def _events(self, answer: _Answer, first: Piece) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events; what is ready together for one piece leaves in one write."""
        stream, pieces, usage = answer.format.stream(answer.head), answer.pieces, answer.usage
        opened: set[int] = set()

        def framed(piece: Piece) -> bytes:
            usage.add(piece)
            events = b""
            if piece.index not in opened:
                opened.add(piece.index)
                events += stream.opening(piece.index, usage.total())
            if piece.text or piece.logprobs:
                events += stream.text(piece.index, piece.text, piece.logprobs)
            for call in piece.calls:
                events += stream.call(piece.index, call)
            if piece.finish_reason is not None:
                events += stream.finish(piece.index, piece.finish_reason, piece.stop_sequence)
            return events

        try:
            async with aclosing(pieces):
                yield framed(first)
                async for piece in pieces:
                    events = framed(piece)
                    if events:
                        yield events
        except WarmpathError as error:
            yield stream.error(error)
        except Exception:
            logger.exception("stream %s failed", answer.head.answer_id)
            yield stream.error(GenerationFailed("The answer broke off because of a fault on the server."))
        except BaseException:  # the client left: the stream was closed or its task cancelled
            self._metrics.disconnects.inc()
            raise
        else:
            await usage.know_miss()
            yield stream.usage(usage.total())


async def _collect(answer: _Answer, unknown: Sequence[UnknownField]) -> Response:
    choices = [WholeChoice(tells_logprobs=answer.tells_logprobs) for _ in range(answer.choices)]
    async with aclosing(answer.pieces) as pieces:
        async for piece in pieces:
            answer.usage.add(piece)
            choices[piece.index].add(piece)
    await answer.usage.know_miss()
    body = answer.format.whole(answer.head, [choice.choice() for choice in choices], answer.usage.total())
    return json_response(body, headers=warning_headers(answer.usage.save, unknown, answer.usage.asked_by))


def use_of(wanted: GenerateRequest, tenant: str) -> Use:
    """Return the way in which a request asks for its prompt."""
    chat = isinstance(wanted, ChatRequest) and wanted.apply_chat_template
    return Use(tenant, wanted.model, wanted.lora_name, wanted.cache_salt, chat)


def warning_headers(
    save: SaveResult | None, unknown: Sequence[UnknownField], asked_by: str = SAVE_FIELD
) -> dict[str, str]:
    """Return ``x-warmpath-warning`` where something that was asked for could not be had; the answer itself is whole.

    ``asked_by``: the field that asked to save.
    """
    warning = "; ".join(filter(None, (save_warning(save, asked_by), ignored_fields(unknown))))
    return {"x-warmpath-warning": warning} if warning else {}


@dataclass(frozen=True, slots=True)
class _Answer:
    """One request's answer while it comes. ``choices``: how many there are, over all prompts."""

    format: AnswerFormat
    head: AnswerHead
    pieces: AsyncGenerator[Piece, None]
    choices: int
    usage: RequestUsage
    tells_logprobs: bool
