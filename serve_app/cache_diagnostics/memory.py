"""What is remembered of a tenant's latest prompts, to compare the next ones with; each tenant has its own room.

A prompt is kept as its first token ids, in memory alone. Remembering costs a few dictionary operations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from router.protocol.block_hash import PrefixScope, TokenArray

MAX_PROMPT_TOKENS = 32_768
"""Of one prompt; what comes behind them is not compared."""
MAX_FAMILIES = 32
FAMILY_PROMPTS = 4
"""Prompts of one system prompt: one that is used much drives out no others."""
MAX_TENANT_BYTES = 4 << 20
MAX_BYTES = 64 << 20
"""Of all tenants."""
PROMPT_BYTES = 512
"""What a prompt takes beside its tokens."""


class SeenPrompt:
    """The beginning of one prompt. ``seen_s``: when its first token came, by ``time.perf_counter``."""

    def __init__(self, token_ids: TokenArray, scope: PrefixScope, system_chars: int, seen_s: float) -> None:
        # A part of a long prompt would keep all of it.
        self.ids = token_ids if len(token_ids) <= MAX_PROMPT_TOKENS else token_ids[:MAX_PROMPT_TOKENS].copy()
        self.cache = scope.lora, scope.salt
        self.system_chars = system_chars
        self.seen_s = seen_s


class PromptMemory:
    """The prompts of all tenants, by family. ``tenants``: how many there are; each has an equal part of ``MAX_BYTES``.

    A tenant's room does not depend on what others send, so that what it is told does not either.
    """

    def __init__(self, tenants: Callable[[], int]) -> None:
        self._tenants = tenants
        self._rooms: OrderedDict[str, OrderedDict[bytes, list[SeenPrompt]]] = OrderedDict()

    def prompts(self, tenant: str) -> list[SeenPrompt]:
        """Return what is remembered of a tenant, the family used least recently first."""
        return [prompt for family in self._rooms.get(tenant, {}).values() for prompt in family]

    def add(self, tenant: str, family: bytes, prompt: SeenPrompt) -> None:
        """Remember a prompt of a tenant, and forget its oldest until all fit."""
        tenants = max(1, self._tenants())
        room = self._rooms.setdefault(tenant, OrderedDict())
        self._rooms.move_to_end(tenant)
        while len(self._rooms) > tenants:  # tenants that are configured no more
            self._rooms.popitem(last=False)
        members = room.setdefault(family, [])
        room.move_to_end(family)
        members.append(prompt)
        del members[:-FAMILY_PROMPTS]
        surplus = sum(seen.ids.nbytes + PROMPT_BYTES for seen in self.prompts(tenant)) - min(
            MAX_TENANT_BYTES, MAX_BYTES // tenants
        )
        while room and (surplus > 0 or len(room) > MAX_FAMILIES):
            oldest, members = next(iter(room.items()))
            surplus -= members.pop(0).ids.nbytes + PROMPT_BYTES
            if not members:
                del room[oldest]
