"""The way of a request for text: its turn, its generations, its answer."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.format import AnswerFormat, AnswerHead
from serve_app.api.request import GenerateRequest
from serve_app.fairness.front_door import Arrival
from serve_app.generation.answer import TokenSource, answer_pieces
from serve_app.generation.generation import Generation
from serve_app.generation.prepare import Preparer
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.ingress.answers import Answer, Deadline, streamed, whole
from serve_app.ingress.drain import Drain
from serve_app.ingress.http import until_disconnect
from serve_app.ingress.observe.answer_meter import AnswerMeter, Counters
from serve_app.ingress.observe.tracing import trace_of
from serve_app.tenants.tenants import Tenant
from serve_app.tracing.request import RequestTrace

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
        readers: AnswerReaders,
        counters: Counters,
        drain: Drain,
        *,
        request_timeout_s: float,
    ) -> None:
        self._preparer = preparer
        self._source = source
        self._readers = readers
        self._counters = counters
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
        wanted = self._readers.checked(wanted)
        # Internal ids are ours: two clients may send the same x-request-id.
        answer_id = uuid.uuid4().hex
        deadline = Deadline(self._drain, arrived_s + self.request_timeout_s, self.request_timeout_s)
        body_bytes, allowance, trace = arrival.body_bytes, arrival.allowance, trace_of(request)
        async with until_disconnect(request):
            generations = await self._begin(wanted, tenant, arrival, answer_id, deadline, trace)
            meter = AnswerMeter(self._counters, wanted, generations, arrived_s, body_bytes, allowance, trace)
            place = arrival.hand_over()
            pieces = answer_pieces(generations, self._source, self._readers.of(wanted), place)
            head = AnswerHead(
                answer_id, int(time.time()), wanted.answering_model, wanted.include_usage, wanted.repeated
            )
            told = wanted.logprobs is not None
            answer = Answer(answer_format, head, pieces, len(generations), place, meter, deadline, told)
            ref = generations[0].prompt_ref
            headers = {PROMPT_HEADER: ref} if ref else {}
            if wanted.stream:
                return await streamed(answer, wanted.unknown, headers, self._counters.metrics.disconnects.inc)
            return await whole(answer, wanted.unknown, headers)

    async def _begin(
        self,
        wanted: GenerateRequest,
        tenant: Tenant,
        arrival: Arrival,
        answer_id: str,
        deadline: Deadline,
        trace: RequestTrace | None,
    ) -> list[Generation]:
        """Wait for the request's turn, then make its generations, and reserve their tokens.

        Raises a WarmpathError when there is no time left, or no token.
        """
        if trace is not None:
            trace.stage("read")
        async with deadline.limit():
            await arrival.turn(wanted.choices)
            if trace is not None:
                trace.stage("wait")
            generations = await self._preparer.prepare(wanted, tenant, answer_id, deadline_s=deadline.at_s)
            if trace is not None:
                trace.stage("prepare")
                traceparent = trace.traceparent
                generations = [replace(generation, traceparent=traceparent) for generation in generations]
        prompt_tokens = sum(len(generation.token_ids) for generation in generations[:: wanted.n])
        most_tokens = sum(generation.sampling.max_tokens for generation in generations)
        arrival.allowance.reserve(prompt_tokens, most_tokens)
        return generations
