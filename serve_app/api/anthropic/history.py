"""Why a prompt's prefix could not be read from the cache: what a request was compared with what an earlier one was.

Remembers digests under a key of this process, never texts, of each tenant's latest messages, by id.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from serve_app.api.format import Usage

MAX_MESSAGES = 256
"""Remembered of each tenant."""
MAX_TENANTS = 1024

_KEY = secrets.token_bytes(32)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Asked:
    """Digests of a request. ``messages``: of its first ones, of one up to all.

    ``compares``: whether ``previous_id`` names the message to compare with.
    """

    model: bytes
    system: bytes
    tools: bytes
    messages: tuple[bytes, ...]
    compares: bool = False
    previous_id: str = ""


@dataclass(frozen=True, slots=True)
class _Known:
    asked: Asked
    count: int
    prompt_tokens: int


def digest(value: Any) -> bytes:
    """Return the digest of anything that JSON can say."""
    return blake2b(_encode(value), digest_size=16, key=_KEY).digest()


def digests(values: Iterable[Any]) -> tuple[bytes, ...]:
    """Return the digests of the first value, of the first two, and so on."""
    so_far = blake2b(digest_size=16, key=_KEY)
    found: list[bytes] = []
    for value in values:
        so_far.update(digest(value))
        found.append(so_far.digest())
    return tuple(found)


class TenantHistory:
    """One tenant's latest messages. ``complete``: no other ingress answered any."""

    def __init__(self, *, complete: bool = True) -> None:
        self._complete = complete
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def compare(self, message_id: str, asked: Asked, usage: Usage) -> dict[str, Any] | None:
        """Remember a request; return its ``diagnostics``, None where it goes on as the one before it."""
        before = self._known.get(asked.previous_id)
        last = asked.messages[-1:]
        short = Asked(asked.model, asked.system, asked.tools, last)
        self._known[message_id] = _Known(short, len(asked.messages), usage.prompt_tokens)
        if len(self._known) > MAX_MESSAGES:
            self._known.popitem(last=False)
        if not asked.compares:
            return None
        if before is None:
            kind = "previous_message_not_found" if self._complete else "unavailable"
            return {"cache_miss_reason": {"type": kind}}
        was = before.asked
        changed = (
            "model_changed" if asked.model != was.model
            else "system_changed" if asked.system != was.system
            else "tools_changed" if asked.tools != was.tools
            else "messages_changed" if asked.messages[before.count - 1 : before.count] != was.messages
            else ""
        )  # fmt: skip
        if not changed:
            return None
        missed = max(0, min(before.prompt_tokens, usage.prompt_tokens) - usage.cached_tokens)
        return {"cache_miss_reason": {"type": changed, "cache_missed_input_tokens": missed}}


class MessageHistory:
    """The histories of all tenants, the least recently used forgotten first."""

    def __init__(self, *, complete: bool = True) -> None:
        self._complete = complete
        self._tenants: OrderedDict[str, TenantHistory] = OrderedDict()

    def of(self, tenant: str) -> TenantHistory:
        """Return a tenant's own."""
        found = self._tenants.setdefault(tenant, TenantHistory(complete=self._complete))
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return found
