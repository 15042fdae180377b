"""The work of a completion: pieces of text become a whole answer or server-sent events, counted and timed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api import sse
from serve_app.api.format import AnswerFormat, AnswerHead
from serve_app.api.request import ChatRequest, GenerateRequest
from serve_app.api.tool_calls import NO_TOOLS
from serve_app.cache_diagnostics.detector import MissDetector
from serve_app.errors import GenerationFailed, WarmpathError
from serve_app.fairness.front_door import Arrival, FrontDoor
from serve_app.fairness.rate_limits import Allowance
from serve_app.generation.answer import Piece, TokenSource, answer_pieces
from serve_app.generation.generation import Generation
from serve_app.generation.prepare import Preparer
from serve_app.generation.request_usage import RequestUsage
from serve_app.generation.tool_calls.forced import forced_calls
from serve_app.generation.tool_calls.tool_calls import ToolCalls
from serve_app.ingress.answers import Answer, events, warning_headers, whole
from serve_app.ingress.drain import LAST_EVENT_S, Drain
from serve_app.ingress.http import TimedStream, until_disconnect
from serve_app.ingress.observe.cache_state import HitRates
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.observe.tracing import trace_of
from serve_app.prompts.traffic import PromptTraffic, Use
from serve_app.tenants.tenants import Tenant
from serve_app.tokenization.tokenizer import PromptTokenizer
from serve_app.tracing.request import RequestTrace
from serve_app.usage.ledger import Ledger

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
        traffic: HitRates,
        front_door: FrontDoor,
        drain: Drain,
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
        self._drain = drain
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
        trace = trace_of(request)
        async with until_disconnect(request):
            generations = await self._begin(wanted, tenant, arrival, answer_id, arrived_s, timeout_s, trace)
            place = arrival.hand_over()
            try:
                decoder, reading = partial(self._tokenizer.decoder, shown), self._tool_calls.reading(use)
                include_stop = wanted.include_stop_str_in_output
                pieces = answer_pieces(
                    generations, self._source, decoder, wanted.stop, place, reading, include_stop=include_stop
                )
                usage, tells = RequestUsage(wanted.n, generations), wanted.logprobs is not None
                pieces = self._timed(
                    pieces, generations, wanted, tenant, arrived_s, timeout_s, body_bytes, allowance, usage, trace
                )
                head = AnswerHead(answer_id, int(time.time()), wanted.answering_model, wanted.include_usage, repeated)
                answer = Answer(answer_format, head, pieces, len(generations), usage, tells)
                ref = generations[0].prompt_ref
                version = {PROMPT_HEADER: ref} if ref else {}
                if not wanted.stream:
                    response = await whole(answer, wanted.unknown)
                    response.headers.update(version)
                    return response
                try:
                    # Errors before the first token still have a status of their own.
                    first = await anext(pieces)
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
        return TimedStream(
            events(answer, first, self._metrics.disconnects.inc),
            headers,
            media_type=sse.CONTENT_TYPE,
            deadline_s=deadline_s,
        )

    async def _begin(
        self,
        wanted: GenerateRequest,
        tenant: Tenant,
        arrival: Arrival,
        answer_id: str,
        arrived_s: float,
        timeout_s: float,
        trace: RequestTrace | None,
    ) -> list[Generation]:
        """Wait for the request's turn, then make its generations, and reserve their tokens.

        Raises a WarmpathError when there is no time left, or no token.
        """
        deadline_s = arrived_s + timeout_s
        if trace is not None:
            trace.stage("read")
        try:
            async with self._drain.limit(deadline_s - time.perf_counter()):
                await arrival.turn(wanted.choices)
                if trace is not None:
                    trace.stage("wait")
                generations = await self._preparer.prepare(wanted, tenant, answer_id, deadline_s=deadline_s)
                if trace is not None:
                    trace.stage("prepare")
                    generations = [replace(each, traceparent=trace.traceparent) for each in generations]
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
        trace: RequestTrace | None,
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
                        async with self._drain.limit(deadline_s - time.perf_counter()):
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
        except WarmpathError as error:
            refused = not last_s
            if trace is not None:
                trace.failed(error.code or type(error).__name__)
            raise
        finally:
            metrics.in_flight.dec()
            if trace is not None:
                trace.used(wanted.answering_model, usage.total())
            allowance.end(refused=refused)
            if last_s:  # where nothing was answered, what it cost is not known, and it was not free
                self._ledger.answer(*used, output_tokens)
                self._front_door.learn(name, body_bytes, uncached_tokens)

    def _out_of_time(self, timeout_s: float) -> WarmpathError:
        if self._drain.over:
            return self._drain.broken_off()
        return GenerationFailed(f"The answer took over {timeout_s:.0f} s; ask for fewer tokens.", code="timeout")


def use_of(wanted: GenerateRequest, tenant: str) -> Use:
    """Return the way in which a request asks for its prompt."""
    chat = isinstance(wanted, ChatRequest) and wanted.apply_chat_template
    return Use(tenant, wanted.model, wanted.lora_name, wanted.cache_salt, chat)
