"""Watches an ingress' requests: what hits is remembered, what misses is explained, in threads, beside the answer.

Each miss is counted by tenant and reason; each pattern is one line of the log, which says what kind of value stands
where, and never what it is.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

from serve_app.cache_diagnostics.explain import MIN_MISSED_TOKENS, REMEDIES, Decode, Miss, explain, is_miss
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

MAX_BEGINNINGS = 4096
"""Of new prompts, over all tenants, as digests."""
_KEY = secrets.token_bytes(32)

Count = Callable[[str, str, int], None]
"""(tenant, reason, lost tokens) of one miss."""


class MissDetector:
    """Explains the misses of one ingress. ``tenants``: how many there are.

    ``count_elsewhere``: called for a tenant's new prompt that another tenant has under another salt; operators alone
    may know of it.
    """

    def __init__(
        self,
        decode: Decode,
        workers: FairWorkers,
        tenants: Callable[[], int],
        count: Count,
        count_elsewhere: Callable[[str], None] = lambda tenant: None,
    ) -> None:
        self._decode = decode
        self._workers = workers
        self._memory = PromptMemory(tenants)
        self._count = count
        self._count_elsewhere = count_elsewhere
        self._beginnings: OrderedDict[bytes, tuple[str, bytes]] = OrderedDict()
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
        tenant, prompt_tokens = generation.tenant, len(generation.token_ids)
        prompt = SeenPrompt(generation.token_ids, generation.scope, generation.system_chars, now_s)
        task: asyncio.Task[Miss] | None = None
        if is_miss(prompt_tokens, cached_tokens):
            earlier = [seen for seen in self._memory.prompts(tenant) if seen.seen_s < arrived_s]
            if self._under_way[tenant] < MAX_AT_ONCE:
                self._under_way[tenant] += 1
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
            size = prompt.ids.nbytes
            miss = await self._workers.run(tenant, size, explain, prompt, cached_tokens, earlier, self._decode)
        except Exception:  # an answer must not fail because nobody can say why it was slow
            logger.exception("a miss could not be explained")
            miss = Miss("not_compared", 0)
        finally:
            self._under_way[tenant] -= 1
            if not self._under_way[tenant]:
                del self._under_way[tenant]
        self._count(tenant, miss.reason, miss.lost_tokens)
        self._log(tenant, miss)
        if miss.reason == "never_seen":
            self._look_elsewhere(tenant, prompt)
        return miss

    def _look_elsewhere(self, tenant: str, prompt: SeenPrompt) -> None:
        """Count a prompt whose beginning came from another tenant, too: its tenant is told nothing of that."""
        beginning = prompt.scope.lora.encode() + b"\0" + prompt.ids[:MIN_MISSED_TOKENS].tobytes()
        digest = blake2b(beginning, digest_size=16, key=_KEY).digest()
        known = self._beginnings.setdefault(digest, (tenant, prompt.scope.salt))
        self._beginnings.move_to_end(digest)
        if len(self._beginnings) > MAX_BEGINNINGS:
            self._beginnings.popitem(last=False)
        if known[0] != tenant and known[1] != prompt.scope.salt:
            self._count_elsewhere(tenant)

    def _log(self, tenant: str, miss: Miss) -> None:
        """Write a line for a pattern that was not seen yet."""
        if miss.reason in QUIET:
            return
        pattern = (tenant, miss.reason, miss.part, (miss.char or 0) // PATTERN_CHARS)
        if pattern in self._logged:
            self._logged.move_to_end(pattern)
            return
        self._logged[pattern] = None
        if len(self._logged) > MAX_PATTERNS:
            self._logged.popitem(last=False)
        where = "" if miss.char is None else f" at character {miss.char} (line {miss.line}) of the {miss.part} part"
        logger.warning(
            "prompts of tenant %s miss the cache: %s%s costs %d tokens. %s",
            tenant, miss.reason, where, miss.lost_tokens, REMEDIES[miss.reason],
        )  # fmt: skip
