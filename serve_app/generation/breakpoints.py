"""How many leading tokens of a prompt a cache breakpoint of its conversation stands for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import takewhile

from router.protocol.block_hash import TokenArray
from serve_app.api.request import CacheBreakpoint, ChatRequest
from serve_app.engine.protocol import Save
from serve_app.errors import InvalidRequest
from serve_app.tokenization.public_tokens import common_tokens

_OTHER_WORDS: dict[str, object] = {"role": "user", "content": "\ue000\ue001\ue000"}
"""What no conversation goes on with: characters for private use."""

Encode = Callable[[ChatRequest], Awaitable[TokenArray]]


async def kept_prefixes(request: ChatRequest, token_ids: TokenArray, encode: Encode, size: int) -> list[Save]:
    """Return what a request's cache breakpoints ask to keep, in whole blocks of ``size`` tokens, the shortest first.

    A breakpoint's prefix is what the conversation as far as there has in common with all of it, in tokens: where the
    last token merges with what follows it is shorter. One that fills no block, or that the chat template refuses
    alone, is none. ``token_ids``: of the whole; ``encode``: a conversation's, without a generation prompt.
    """
    found: dict[int, float] = {}
    for breakpoint_ in request.breakpoints:
        messages = _as_far_as(breakpoint_, request)
        try:
            alone = await encode(
                ChatRequest(
                    model=request.model, messages=messages, tool_use=request.tool_use, prompt_ref=request.prompt_ref
                )
            )
        except InvalidRequest:
            continue
        tokens = common_tokens(alone, token_ids) // size * size
        if tokens:
            found[tokens] = max(breakpoint_.ttl_s, found.get(tokens, 0.0))
    return [Save(b"", tokens, ttl_s) for tokens, ttl_s in sorted(found.items())]


def _as_far_as(breakpoint_: CacheBreakpoint, request: ChatRequest) -> tuple[dict[str, object], ...]:
    """Return the conversation to compare with. Templates write tools and system messages as one, before others."""
    messages = breakpoint_.messages or tuple(takewhile(lambda message: message["role"] == "system", request.messages))
    shown = tuple(dict(message) for message in messages)
    return shown if any(message["role"] != "system" for message in messages) else (*shown, _OTHER_WORDS)
