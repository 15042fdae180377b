"""One request to a worker: its body goes out, and the checked parts of its answer come back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import aiohttp
import msgspec

from serve_app.engine.protocol import EngineRequest
from serve_app.engine.remote.answers import (
    CheckedAnswer,
    Part,
    WorkerGone,
    event_bytes,
    refusal,
    refused,
    whole_bytes,
)
from serve_app.engine.remote.dialect import Dialect
from serve_app.engine.remote.reading import (
    ERROR_BYTES,
    LARGE_BYTES,
    LIES,
    Events,
    Untrue,
    WorkerHttp,
    check_plain,
    decoded,
    printable,
    read,
)

END_S = 5.0
"""How long a server may take, after an answer's last token, to tell its usage and end the stream."""


async def parts_of(
    http: WorkerHttp,
    url: str,
    dialect: Dialect,
    body: dict[str, Any],
    request: EngineRequest,
    vocab_size: int,
    heard: Callable[[], None] = lambda: None,
) -> AsyncIterator[Part]:
    """Yield an answer's parts, as far as they may be passed on. ``url``: of the server; ``heard``: called for each.

    Raises WorkerGone, Busy, and ValueError for what the server refuses.
    """
    again = dialect.repeats_tokens
    answer = CheckedAnswer(request, vocab_size)

    def decode(event: bytes) -> Part:
        return dialect.part(event, request, answer.had)

    try:
        async with http.ask(url + dialect.answers_at, msgspec.json.encode(body)) as response:
            if response.status != 200:
                body_of_error = b""
                with suppress(Untrue):  # the status is enough
                    body_of_error = await read(response, ERROR_BYTES)
                raise refusal(url, response.status, body_of_error)
            if request.sampling.prompt_logprobs is not None:
                part = await decoded(partial(dialect.whole, request), await read(response, whole_bytes(request)))
                if part.error:
                    raise refused(url, part.status, part.error)
                yield answer.take(part)
                return
            check_plain(response)
            events = Events(response, event_bytes(request, had=0, all_tokens=again))
            stream, says_end = aiter(events), False
            async for event in stream:
                part = decode(event) if len(event) <= LARGE_BYTES else await decoded(decode, event)
                if part.error:
                    raise refused(url, part.status, part.error)
                heard()
                says_end = bool(part.finish)
                yield answer.take(part)
                if answer.ended:
                    break
                if part.token_ids:
                    events.advanced(event_bytes(request, had=answer.had, all_tokens=again))
            if not (answer.ended and says_end):
                return  # a server that goes on after all that was asked for hears that we left
            last = Part()
            with suppress(*LIES, aiohttp.ClientError, OSError):  # the answer is whole, also without its usage
                async with asyncio.timeout(END_S):
                    async for event in stream:
                        part = answer.take(decode(event))
                        last.cached_tokens = last.cached_tokens if part.cached_tokens is None else part.cached_tokens
            yield last
    except (aiohttp.ClientError, OSError) as error:
        raise WorkerGone(f"{url} broke off an answer ({type(error).__name__})") from error
    except LIES as error:
        raise WorkerGone(f"{url} sent what is no answer: {printable(str(error))}") from error
