"""Watches an ingress' requests: what hits is remembered, what misses is explained, in threads, beside the answer.

Each miss is counted by tenant and reason; each pattern is one line of the log, which says what kind of value stands
where, and never what it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from serve_app.cache_diagnostics.explain import REMEDIES, Decode, Miss, explain, is_miss
from serve_app.cache_diagnostics.memory import PromptMemory, SeenPrompt
from serve_app.fairness.workers import FairWorkers
from serve_app.generation.generation import Generation

logger = logging.getLogger(__name__)

MAX_AT_ONCE = 4
"""Misses of a tenant that are being explained; further ones are counted as ``not_compared``."""
MAX_PATTERNS = 1024
"""Remembered as logged."""
PATTERN_CHARS = 64
"""Differences of one class that lie so near each other are one pattern."""
QUIET = ("never_seen", "not_compared", "evicted")
"""Reasons that are no fault of a prompt, and no line of the log."""


class MissDetector:
    """Explains the misses of one ingress. ``tenants``: how many there are.

    ``count``: called with the tenant, reason and lost tokens of each miss.
    """

    def __init__(
        self,
        decode: Decode,
        workers: FairWorkers,
        tenants: Callable[[], int],
        count: Callable[[str, str, int], None],
    ) -> None:
        self._decode = decode
        self._workers = workers
        self._memory = PromptMemory(tenants)
        self._count = count
        self._under_way: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[Miss]] = set()
        self._logged: OrderedDict[tuple[str, str, str, int], None] = OrderedDict()

    def observe(
        self, generation: Generation, cached_tokens: int, arrived_s: float, now_s: float
    ) -> asyncio.Task[Miss] | None:
        """Remember a prompt whose first token came; return the explanation to come, None where it was no miss.

        A request that leaves nothing in the cache is not remembered, and not explained.
        """
        if not generation.store_kv:
            return None
        tenant, task = generation.tenant, None
        prompt = SeenPrompt(generation.token_ids, generation.scope, generation.system_chars, now_s)
        if is_miss(len(generation.token_ids), cached_tokens):
            if self._under_way[tenant] < MAX_AT_ONCE:
                self._under_way[tenant] += 1
                earlier = [seen for seen in self._memory.prompts(tenant) if seen.seen_s < arrived_s]
                task = asyncio.create_task(self._explain(tenant, prompt, cached_tokens, earlier))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._count(tenant, "not_compared", 0)
        self._memory.add(tenant, generation.placement_key, prompt)
        return task

    async def _explain(
        self, tenant: str, prompt: SeenPrompt, cached_tokens: int, earlier: Sequence[SeenPrompt]
    ) -> Miss:
        try:
            miss = await self._workers.run(
                tenant, prompt.ids.nbytes, explain, prompt, cached_tokens, earlier, self._decode
            )
        except Exception:  # an answer must not fail because nobody can say why it was slow
            logger.exception("a miss could not be explained")
            miss = Miss("not_compared", 0)
        finally:
            self._under_way[tenant] -= 1
        self._count(tenant, miss.reason, miss.lost_tokens)
        self._log(tenant, miss)
        return miss

    def _log(self, tenant: str, miss: Miss) -> None:
        """Write a line for a pattern that was not seen yet."""
        place, where = miss.first_difference, ""
        pattern = (tenant, miss.reason, place.part if place else "", place.char // PATTERN_CHARS if place else 0)
        if miss.reason in QUIET or pattern in self._logged:
            return
        self._logged[pattern] = None
        if len(self._logged) > MAX_PATTERNS:
            self._logged.popitem(last=False)
        if place is not None:
            where = f" at character {place.char} (line {place.line}) of the {place.part} part"
        logger.warning(
            "prompts of tenant %s miss the cache: %s%s costs %d tokens. %s",
            tenant, miss.reason, where, miss.lost_tokens, REMEDIES[miss.reason],
        )  # fmt: skip
