"""What is remembered of a tenant's latest prompts, to compare the next ones with; each tenant has its own room.

A prompt is kept as its first token ids, in memory alone. Remembering costs a few dictionary operations; what comparing
needs beyond the ids is made when it is first needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property

import numpy as np

from router.protocol.block_hash import PrefixScope, TokenArray
from serve_app.cache_diagnostics.difference import Hashes, grams

MAX_PROMPT_TOKENS = 32_768
"""Of one prompt; what comes behind them is not compared."""
MAX_FAMILIES = 32
FAMILY_PROMPTS = 4
"""Prompts of one system prompt: one that is used much drives out no others."""
MAX_TENANT_BYTES = 4 << 20
MAX_BYTES = 64 << 20
"""Of all tenants."""
SKETCH_GRAMS = 256


class SeenPrompt:
    """The beginning of one prompt. ``seen_s``: when its first token came, by ``time.perf_counter``."""

    def __init__(self, token_ids: TokenArray, scope: PrefixScope, system_chars: int, seen_s: float) -> None:
        # A part of a long prompt would keep all of it.
        self.ids = token_ids if len(token_ids) <= MAX_PROMPT_TOKENS else token_ids[:MAX_PROMPT_TOKENS].copy()
        self.scope = scope
        self.system_chars = system_chars
        self.seen_s = seen_s

    @property
    def bytes(self) -> int:
        """The most that it takes."""
        return self.ids.nbytes + SKETCH_GRAMS * 8 + 512

    @cached_property
    def sketch(self) -> Hashes:
        """The smallest hashes of its grams: prompts that have many in common share much, wherever it stands.

        Source: bottom-k sketches of shingles (Broder, 1997).
        """
        return np.unique(grams(self.ids))[:SKETCH_GRAMS].copy()


class TenantMemory:
    """One tenant's prompts by family, the least recently used forgotten first."""

    def __init__(self) -> None:
        self._families: OrderedDict[bytes, list[SeenPrompt]] = OrderedDict()

    def prompts(self) -> list[SeenPrompt]:
        """Return all that is remembered, the oldest family first."""
        return [prompt for family in self._families.values() for prompt in family]

    def add(self, family: bytes, prompt: SeenPrompt, max_bytes: int) -> None:
        """Remember a prompt, and forget others until all fit into ``max_bytes``."""
        members = self._families.setdefault(family, [])
        self._families.move_to_end(family)
        members.append(prompt)
        del members[:-FAMILY_PROMPTS]
        size = sum(seen.bytes for seen in self.prompts())
        while self._families and (size > max_bytes or len(self._families) > MAX_FAMILIES):
            oldest, members = next(iter(self._families.items()))
            size -= members.pop(0).bytes
            if not members:
                del self._families[oldest]


class PromptMemory:
    """The memories of all tenants. ``tenants``: how many there are; each has an equal part of ``MAX_BYTES``.

    A tenant's room does not depend on what others send, so that what it is told does not either.
    """

    def __init__(self, tenants: Callable[[], int]) -> None:
        self._tenants = tenants
        self._by_tenant: OrderedDict[str, TenantMemory] = OrderedDict()

    def prompts(self, tenant: str) -> list[SeenPrompt]:
        """Return what is remembered of a tenant."""
        memory = self._by_tenant.get(tenant)
        return [] if memory is None else memory.prompts()

    def add(self, tenant: str, family: bytes, prompt: SeenPrompt) -> None:
        """Remember a prompt of a tenant."""
        tenants = max(1, self._tenants())
        memory = self._by_tenant.setdefault(tenant, TenantMemory())
        self._by_tenant.move_to_end(tenant)
        memory.add(family, prompt, min(MAX_TENANT_BYTES, MAX_BYTES // tenants))
        while len(self._by_tenant) > tenants:  # tenants that are configured no more
            self._by_tenant.popitem(last=False)
