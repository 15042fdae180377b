"""Explains an ingress' misses, in threads beside the answers. ``PromptMemory`` keeps each tenant's last prompts."""

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from serve_app.api.format import Usage
from serve_app.cache_misses.reasons import Decode, Miss, SeenPrompt, explain, is_miss
from serve_app.engine.protocol import EngineRequest
from serve_app.fairness.queue import FairWorkers

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 4
"""The maximum of a tenant's misses explained at once. Further ones are counted as ``not_compared``."""
MAX_FAMILIES = 32
FAMILY_PROMPTS = 4
"""The maximum of prompts with one system prompt, so that a popular one does not displace others."""
MAX_TENANT_BYTES = 4 << 20
MAX_BYTES = 64 << 20
"""The maximum for all tenants together."""
PROMPT_BYTES = 512
"""A prompt's memory beside its tokens."""


class PromptMemory:
    """The prompts of all tenants, by family. ``tenants``: their number.

    Each tenant has an equal part of ``MAX_BYTES``, so that its explanations reveal nothing about others.
    """

    def __init__(self, tenants: Callable[[], int]) -> None:
        self._tenants = tenants
        self._rooms: OrderedDict[str, OrderedDict[bytes, deque[SeenPrompt]]] = OrderedDict()

    def prompts(self, tenant: str) -> list[SeenPrompt]:
        """Return a tenant's prompts, with the least recently used family first."""
        return [prompt for family in self._rooms.get(tenant, {}).values() for prompt in family]

    def add(self, tenant: str, family: bytes, prompt: SeenPrompt) -> None:
        """Remember a prompt of a tenant, and drop its oldest families until all fit."""
        tenants = max(1, self._tenants())
        room = self._rooms.setdefault(tenant, OrderedDict())
        self._rooms.move_to_end(tenant)
        while len(self._rooms) > tenants:  # tenants no longer configured
            self._rooms.popitem(last=False)
        room.setdefault(family, deque(maxlen=FAMILY_PROMPTS)).append(prompt)
        room.move_to_end(family)
        most_bytes = min(MAX_TENANT_BYTES, MAX_BYTES // tenants)
        while (
            len(room) > MAX_FAMILIES
            or sum(seen.ids.nbytes + PROMPT_BYTES for seen in chain.from_iterable(room.values())) > most_bytes
        ):
            room.popitem(last=False)


@dataclass(eq=False)
class MissDetector:
    """Explains the misses of one ingress. ``count`` receives the tenant, reason and lost tokens of each."""

    decode: Decode
    workers: FairWorkers
    memory: PromptMemory
    count: Callable[[str, str, int], None]
    _under_way: Counter[str] = field(default_factory=Counter)
    _tasks: set[asyncio.Task[Miss]] = field(default_factory=set)

    def observe(
        self,
        generation: EngineRequest,
        cached_tokens: int,
        arrived_s: float,
        now_s: float,
        usage: Callable[[], Usage] | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> asyncio.Task[Miss] | None:
        """Remember a prompt at its first token. Return a task for a miss's explanation, else None.

        ``usage``: returns that of the answer so far, which continues. ``messages``: of the prompt. A request that
        leaves nothing in the cache is neither remembered nor explained.
        """
        if not generation.store_kv:
            return None
        tenant, task = generation.tenant, None
        prompt = SeenPrompt(generation.identity, generation.scope, generation.system_chars, now_s, usage)
        if generation.reads_kv and is_miss(len(generation.token_ids), cached_tokens):
            if self._under_way[tenant] < MAX_AT_ONCE:
                self._under_way[tenant] += 1
                earlier = [seen for seen in self.memory.prompts(tenant) if seen.seen_s < arrived_s]
                task = asyncio.create_task(self._explain(tenant, prompt, cached_tokens, earlier, messages))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self.count(tenant, "not_compared", 0)
        self.memory.add(tenant, generation.placement_key, prompt)
        return task

    async def _explain(
        self,
        tenant: str,
        prompt: SeenPrompt,
        cached_tokens: int,
        earlier: Sequence[SeenPrompt],
        messages: Sequence[Mapping[str, Any]],
    ) -> Miss:
        texts = [message["content"] for message in messages]
        try:
            miss = await self.workers.run(
                tenant, prompt.ids.nbytes, explain, prompt, cached_tokens, earlier, self.decode, texts
            )
        except Exception:  # an answer must not fail with its explanation
            logger.exception("a miss could not be explained")
            miss = Miss("not_compared", 0)
        finally:
            self._under_way[tenant] -= 1
        self.count(tenant, miss.reason, miss.lost_tokens)
        return miss
