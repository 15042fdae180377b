"""The work of a completion: pieces of text become a whole answer or server-sent events, counted and timed.

Owns usage, deadlines and what happens when a client leaves. Knows nothing of routes, of authentication, or of
where tokens come from.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from serve_app.api import sse
from serve_app.api.openai.response import ChatStream, Choice, CompletionStream, Usage, chat_completion, completion
from serve_app.api.request import GenerateRequest
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import SaveOutcome
from serve_app.errors import GenerationFailed, WarmpathError
from serve_app.generation.answer import Piece, TokenSource, answer_pieces
from serve_app.generation.generation import Generation
from serve_app.generation.prepare import Preparer
from serve_app.ingress.http import json_response, until_disconnect
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.tenants.tenants import Tenant
from serve_app.tenants.usage import UsageTable
from serve_app.tokenization.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)

_SAVE_WARNINGS = {
    "over_budget": "not saved, because the pin budget of the replica is full",
    "too_short": "not saved, because the system prompt does not fill a KV block",
    "failed": "not saved, because its prefill failed",
    "off": "not saved, because prefix caching is switched off",
}


class Completions:
    """Answers chat and text completions."""

    def __init__(
        self,
        config: AppConfig,
        preparer: Preparer,
        source: TokenSource,
        tokenizer: PromptTokenizer,
        metrics: IngressMetrics,
        traffic: UsageTable,
    ) -> None:
        self._config = config
        self._preparer = preparer
        self._source = source
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._traffic = traffic

    async def respond(self, request: Request, wanted: GenerateRequest, tenant: Tenant, arrived_s: float) -> Response:
        """Return the answer, whole or as a stream that has its first piece already.

        Raises a ``WarmpathError`` for whatever fails before that piece, ClientDisconnect when the client leaves.
        """
        # Internal ids are ours: two clients may send the same x-request-id.
        internal_id = uuid.uuid4().hex
        generations = await self._preparer.prepare(wanted, tenant, internal_id)
        pieces = self._timed(
            answer_pieces(generations, self._source, self._tokenizer.decoder, wanted.stop),
            generations,
            tenant,
            arrived_s,
        )
        response_id = f"{'chatcmpl' if wanted.kind == 'chat' else 'cmpl'}-{internal_id}"
        if not wanted.stream:
            return await until_disconnect(request, self._collect(wanted, generations, pieces, response_id))
        try:
            # Errors before the first token still have a status of their own.
            first = await until_disconnect(request, anext(pieces))
        except BaseException:
            await pieces.aclose()
            raise
        events = self._events(wanted, generations, first, pieces, response_id)
        headers = {**sse.HEADERS, **warning_headers(first.save)}
        return StreamingResponse(events, headers=headers, media_type=sse.CONTENT_TYPE)

    async def _timed(
        self,
        pieces: AsyncGenerator[Piece, None],
        generations: list[Generation],
        tenant: Tenant,
        arrived_s: float,
    ) -> AsyncGenerator[Piece, None]:
        """Pass pieces on, counting; raises GenerationFailed when they take longer than a request may."""
        metrics, name = self._metrics, tenant.name
        deadline_s = arrived_s + self._config.request_timeout_s
        last_s: dict[int, float] = {}
        metrics.in_flight.inc()
        try:
            async with aclosing(pieces):
                while True:
                    try:
                        async with asyncio.timeout(deadline_s - time.perf_counter()):
                            piece = await anext(pieces)
                    except StopAsyncIteration:
                        return
                    except TimeoutError as error:
                        raise GenerationFailed(
                            f"The answer took over {self._config.request_timeout_s:.0f} s; ask for fewer tokens.",
                            code="timeout",
                        ) from error
                    now_s = time.perf_counter()
                    if piece.cached_tokens is not None:
                        generation = generations[piece.index]
                        prompt_tokens = len(generation.token_ids)
                        metrics.ttft_s.labels(name).observe(now_s - arrived_s)
                        metrics.prompt_tokens.labels(name).inc(prompt_tokens)
                        metrics.cached_tokens.labels(name).inc(piece.cached_tokens)
                        self._traffic.add(name, generation.placement_key, prompt_tokens, piece.cached_tokens)
                    elif piece.new_tokens and piece.index in last_s:
                        metrics.inter_token_s.labels(name).observe((now_s - last_s[piece.index]) / piece.new_tokens)
                    last_s[piece.index] = now_s
                    metrics.completion_tokens.labels(name).inc(piece.new_tokens)
                    yield piece
        finally:
            metrics.in_flight.dec()

    async def _collect(
        self,
        wanted: GenerateRequest,
        generations: list[Generation],
        pieces: AsyncGenerator[Piece, None],
        response_id: str,
    ) -> Response:
        tally = _Tally(wanted, generations)
        texts = [""] * len(generations)
        reasons: list[Any] = ["length"] * len(generations)
        async with aclosing(pieces):
            async for piece in pieces:
                tally.add(piece)
                texts[piece.index] += piece.text
                if piece.finish_reason is not None:
                    reasons[piece.index] = piece.finish_reason
        choices = [Choice(text, reason) for text, reason in zip(texts, reasons, strict=True)]
        build = chat_completion if wanted.kind == "chat" else completion
        body = build(response_id, int(time.time()), wanted.answering_model, choices, tally.usage())
        return json_response(body, headers=warning_headers(tally.save))

    async def _events(
        self,
        wanted: GenerateRequest,
        generations: list[Generation],
        first: Piece,
        pieces: AsyncGenerator[Piece, None],
        response_id: str,
    ) -> AsyncIterator[bytes]:
        """Yield server-sent events; what is ready together for one piece leaves in one write."""
        kind = ChatStream if wanted.kind == "chat" else CompletionStream
        stream = kind(response_id, int(time.time()), wanted.answering_model, include_usage=wanted.include_usage)
        tally = _Tally(wanted, generations)
        opened: set[int] = set()
        ended = False

        def framed(piece: Piece) -> bytes:
            tally.add(piece)
            payloads: list[bytes | None] = []
            if piece.index not in opened:
                opened.add(piece.index)
                payloads.append(stream.opening(piece.index))
            if piece.text:
                payloads.append(stream.text(piece.index, piece.text))
            if piece.finish_reason is not None:
                payloads.append(stream.finish(piece.index, piece.finish_reason))
            return b"".join(sse.data_event(payload) for payload in payloads if payload is not None)

        try:
            async with aclosing(pieces):
                yield framed(first)
                async for piece in pieces:
                    event = framed(piece)
                    if event:
                        yield event
            ending = sse.data_event(stream.usage(tally.usage())) if wanted.include_usage else b""
            ended = True
            yield ending + sse.DONE
        except WarmpathError as error:
            ended = True
            yield sse.error_event(error)
        except Exception:
            ended = True
            logger.exception("stream %s failed", response_id)
            yield sse.error_event(GenerationFailed("The answer broke off because of a fault on the server."))
        finally:
            if not ended:
                self._metrics.disconnects.inc()


def warning_headers(save: SaveOutcome | None) -> dict[str, str]:
    """Return ``x-warmpath-warning`` where a save was asked for and could not be had; the answer itself is whole."""
    reason = _SAVE_WARNINGS.get(save or "")
    return {"x-warmpath-warning": f"save_system_prompt_kv_cache: {reason}"} if reason else {}


class _Tally:
    """Adds up a request's usage; a prompt counts once, however many choices it has."""

    def __init__(self, wanted: GenerateRequest, generations: list[Generation]) -> None:
        self._choices = wanted.n
        self._prompt_tokens = sum(len(generation.token_ids) for generation in generations[:: wanted.n])
        self._completion_tokens = 0
        self._cached_tokens = 0
        self.save: SaveOutcome | None = None

    def add(self, piece: Piece) -> None:
        self._completion_tokens += piece.new_tokens
        self.save = self.save or piece.save
        if piece.cached_tokens is not None and piece.index % self._choices == 0:
            self._cached_tokens += piece.cached_tokens

    def usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens)
