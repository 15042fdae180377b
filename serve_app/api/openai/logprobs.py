"""Log-probabilities of tokens in OpenAI's two shapes: that of chats and responses, and (legacy) completions'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.api.format import ShownToken, ToldToken

LEAST = -9999.0
"""JSON has no infinity. Source: vLLM."""


def chat_logprobs(tokens: Sequence[ToldToken]) -> dict[str, Any]:
    """Return the ``logprobs`` of a choice of a chat completion, or of its chunk."""
    return {"content": told_tokens(tokens), "refusal": None}


def told_tokens(tokens: Sequence[ToldToken]) -> list[dict[str, Any]]:
    """Return tokens as chats and responses list them."""
    return [{**_shown(told.token), "top_logprobs": [_shown(other) for other in told.top]} for told in tokens]


def completion_logprobs(tokens: Sequence[ToldToken]) -> dict[str, Any]:
    """Return the ``logprobs`` of a choice of a completion, or of its chunk. A token is always among its own top."""
    return {
        "text_offset": [told.offset for told in tokens],
        "token_logprobs": [max(told.token.logprob, LEAST) for told in tokens],
        "tokens": [_name(told.token.raw) for told in tokens],
        "top_logprobs": [
            {_name(shown.raw): max(shown.logprob, LEAST) for shown in (told.token, *told.top)} for told in tokens
        ],
    }


def _shown(token: ShownToken) -> dict[str, Any]:
    text = token.raw.decode(errors="replace")
    return {"token": text, "bytes": list(token.raw), "logprob": max(token.logprob, LEAST)}


def _name(raw: bytes) -> str:
    """Return a token as text; what is no whole character is told as its bytes. Source: OpenAI's completions."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
