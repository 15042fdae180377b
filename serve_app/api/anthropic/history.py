"""Explain a cache miss by comparing a request with an earlier one of its tenant.

It stores digests under a key of this process, never texts. The comparison needs the request alone, before any token.
"""

import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from serve_app.api.format import Usage

MAX_MESSAGES = 256
"""The number stored for each tenant."""
MAX_TENANTS = 1024

_KEY = secrets.token_bytes(32)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class RequestDigests:
    """Digests of a request. ``messages``: one digest for each prefix of the messages, shortest first.

    ``previous_id`` names the message to compare with; None: no comparison.
    """

    model: bytes
    system: bytes
    tools: bytes
    messages: tuple[bytes, ...]
    previous_id: str | None = None


def digest(value: Any) -> bytes:
    """Return the digest of a JSON value."""
    return blake2b(_encode(value), digest_size=16, key=_KEY).digest()


def digests(values: Iterable[Any]) -> tuple[bytes, ...]:
    """Return the digests of the first value, the first two values, and so on."""
    first = blake2b(digest_size=16, key=_KEY)
    prefixes: list[bytes] = []
    for value in values:
        first.update(digest(value))
        prefixes.append(first.digest())
    return tuple(prefixes)


class MessageHistory:
    """The latest messages of each tenant, kept apart. ``complete``: no other ingress answered any."""

    def __init__(self, *, complete: bool = True) -> None:
        self._complete = complete
        self._rooms: OrderedDict[str, OrderedDict[str, tuple[RequestDigests, int, int]]] = OrderedDict()

    def compare(self, tenant: str, message_id: str, digests: RequestDigests, usage: Usage) -> dict[str, Any] | None:
        """Store a request; return its ``diagnostics``, None if it continues the previous one unchanged."""
        room = self._rooms.setdefault(tenant, OrderedDict())
        self._rooms.move_to_end(tenant)
        if len(self._rooms) > MAX_TENANTS:
            self._rooms.popitem(last=False)
        before = room.get(digests.previous_id or "")
        last = RequestDigests(digests.model, digests.system, digests.tools, digests.messages[-1:])
        room[message_id] = last, len(digests.messages), usage.prompt_tokens
        if len(room) > MAX_MESSAGES:
            room.popitem(last=False)
        if digests.previous_id is None:
            return None
        if before is None:
            kind = "previous_message_not_found" if self._complete else "unavailable"
            return {"cache_miss_reason": {"type": kind}}
        was, count, prompt_tokens = before
        changes = {
            "model_changed": digests.model != was.model,
            "system_changed": digests.system != was.system,
            "tools_changed": digests.tools != was.tools,
            "messages_changed": digests.messages[count - 1 : count] != was.messages,
        }
        changed = next((kind for kind, differs in changes.items() if differs), None)
        if changed is None:
            return None
        missed = max(0, min(prompt_tokens, usage.prompt_tokens) - usage.cached_tokens)
        return {"cache_miss_reason": {"type": changed, "cache_missed_input_tokens": missed}}
