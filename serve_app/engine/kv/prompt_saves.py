"""Explicit saves: a prefix is computed before the request that asks for it, and pinned; or after, what it computed.

Owns the saves under way: each is a sequence of its own, without a client. In: sequences that arrive or end; out: the
sequence to run first, pins in the cache, and each request's outcome. A save that fails is a warning, never the
request's failure.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from router.protocol.block_hash import HASH_BYTES, hash_at
from serve_app.cache.prefix.block_index import CachedBlock
from serve_app.cache.prefix.hot_prefixes import SavedPrefix
from serve_app.cache.prefix.pins import PinOutcome
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.metrics import EngineMeters
from serve_app.engine.protocol import FinishReason, Save, SaveOutcome, SaveResult
from serve_app.engine.scheduling.sequence import SequenceState

_log = logging.getLogger(__name__)

MAX_KEPT_PREFIXES = 256
"""Pins that one tenant's requests may add to its others: each remembers all of its blocks."""

Write = Callable[[list[CachedBlock], float | None], bool]


@dataclass(slots=True)
class _UnderWay:
    """A save being computed, and the requests that wait for it; the first of them asked for it."""

    save: Save
    blocks: int
    followers: list[SequenceState] = field(default_factory=list)


class PromptSaves:
    """Starts and ends saves; belongs to the engine's loop.

    ``write``: writes what is saved (children first) to disk, for how long (``TierSpiller.save``); None without tiers.
    """

    def __init__(self, cache: PrefixCache, meters: EngineMeters, write: Write | None = None) -> None:
        self._cache = cache
        self._meters = meters
        self._under_way: dict[str, _UnderWay] = {}
        self._by_key: dict[bytes, str] = {}
        self._numbers = count()
        self._write = write

    def arrived(self, sequence: SequenceState) -> SequenceState | None:
        """Return the sequence that has to run before ``sequence``, if its save needs a new one."""
        save, cache = sequence.request.save, self._cache
        if save is None:
            return None
        blocks = min(save.tokens, sequence.prompt_tokens) // cache.block_size
        known = self._by_key.get(save.key)
        if known is not None:
            self._follow(sequence, known)
        elif not cache.enabled:
            self._record_outcome(sequence, "off")
        elif not blocks:
            self._record_outcome(sequence, "too_short")
        elif cache.renew_pin(save.key, save.ttl_s):
            self._record_outcome(sequence, "present")
        elif blocks > cache.pins.budget_blocks:
            self._record_outcome(sequence, "too_large", (blocks, 0, cache.pins.budget_blocks))
        elif not cache.may_pin(sequence.chain, blocks, sequence.request.tenant):
            self._record_outcome(sequence, "over_budget", self._room(sequence, blocks))
        else:
            return self._begin(sequence, save, blocks)
        return None

    def ended(self, sequence: SequenceState, reason: FinishReason) -> bool:
        """Note that a sequence is about to give its blocks back; return whether it was a save's own."""
        under_way = self._under_way.pop(sequence.request.request_id, None)
        if under_way is None:
            return False
        save = under_way.save
        del self._by_key[save.key]
        outcome: SaveOutcome = "failed"
        # Fewer are published only if a hash is taken by other content: such a prefix can never be hit.
        if reason == "length" and sequence.published >= under_way.blocks:
            pinned = self._cache.pin(
                save.key, sequence.blocks[: under_way.blocks], save.ttl_s, tenant=sequence.request.tenant
            )
            outcome = "saved" if pinned == "pinned" else pinned
            if outcome == "saved":
                self._write_to_disk(sequence.blocks[: under_way.blocks], save.ttl_s)
        for follower in under_way.followers:
            room = self._room(follower, under_way.blocks) if outcome == "over_budget" else (0, 0, 0)
            self._record_outcome(follower, outcome, room)
            outcome = "present" if outcome == "saved" else outcome
        return True

    def keep(self, sequence: SequenceState) -> None:
        """Pin the prefixes that a request asks to keep, as far as they fit, now that all of its prompt has KV."""
        cache, tenant = self._cache, sequence.request.tenant
        if not cache.enabled:
            self._record_outcome(sequence, "off")
            return
        outcomes: list[SaveOutcome] = []
        for kept in sequence.request.keep:
            blocks = min(kept.tokens // cache.block_size, sequence.published)
            if not blocks:
                continue
            # Equal prefixes are one pin; nobody's request renews another tenant's.
            key = hash_at(sequence.chain, blocks - 1) + tenant.encode()
            if cache.renew_pin(key, kept.ttl_s):
                outcomes.append("present")
            elif blocks > cache.pins.budget_blocks:
                self._record_outcome(sequence, "too_large", (blocks, 0, cache.pins.budget_blocks))
                return
            elif (
                cache.pins.of_tenant(tenant) >= MAX_KEPT_PREFIXES
                or cache.pin(key, sequence.blocks[:blocks], kept.ttl_s, tenant=tenant) == "over_budget"
            ):
                self._record_outcome(sequence, "over_budget", self._room(sequence, blocks))
                return
            else:
                outcomes.append("saved")
        if outcomes:
            self._record_outcome(sequence, "saved" if "saved" in outcomes else "present")

    def take_over(self, saved: SavedPrefix, blocks: list[int]) -> PinOutcome:
        """Keep what another replica kept as a save; ``blocks``: all of the prefix."""
        outcome = self._cache.pin(saved.key, blocks, saved.ttl_s, tenant=saved.tenant, unread_s=saved.unread_s)
        if outcome == "pinned":
            self._write_to_disk(blocks, None if saved.ttl_s is None else saved.ttl_s - saved.unread_s)
        return outcome

    def abandon(self, sequence: SequenceState) -> str | None:
        """Note that a request was cancelled; return the id of the save that nobody waits for any more, if any."""
        under_way = self._under_way.get(sequence.after)
        if under_way is None or sequence not in under_way.followers:
            return None
        under_way.followers.remove(sequence)
        return None if under_way.followers else sequence.after

    def _begin(self, sequence: SequenceState, save: Save, blocks: int) -> SequenceState:
        request, size = sequence.request, self._cache.block_size
        chain = sequence.chain[: blocks * HASH_BYTES]
        first = replace(
            request,
            request_id=f"save {next(self._numbers)} of {request.request_id}",
            token_ids=request.token_ids[: blocks * size],
            block_hashes=chain,
            sampling=replace(request.sampling, max_tokens=0),
            save=None,
            keep=(),
            timeout_s=math.inf,
        )
        self._under_way[first.request_id] = _UnderWay(save, blocks)
        self._by_key[save.key] = first.request_id
        self._follow(sequence, first.request_id)
        return SequenceState(first, lambda _: None, chain, sequence.arrival_s)

    def _follow(self, sequence: SequenceState, save_id: str) -> None:
        under_way = self._under_way[save_id]
        under_way.followers.append(sequence)
        sequence.after = save_id
        # These tokens are counted as the save's work, not twice.
        sequence.held_blocks_hint = max(
            sequence.held_blocks_hint,
            min(under_way.blocks, self._cache.reusable_blocks(sequence.prompt_tokens)),
        )

    def _write_to_disk(self, blocks: list[int], ttl_s: float | None) -> None:
        """Have a save on disk too, so that it outlives this process, by what is left of its TTL if it has one."""
        if self._write is None:
            return
        entries = [self._cache.index.of_block(block) for block in reversed(blocks)]
        if not self._write([entry for entry in entries if entry is not None], ttl_s):
            _log.info(
                "a saved prompt of %d blocks is not on disk: there is no disk tier, or its queue is full", len(blocks)
            )

    def _room(self, sequence: SequenceState, blocks: int) -> tuple[int, int, int]:
        """Return how many blocks a save would add to its tenant's, how many those are, and how many they may be."""
        tenant, pins = sequence.request.tenant, self._cache.pins
        known = self._cache.index.leading(sequence.chain, blocks)
        return blocks - pins.pinned_leading(known, tenant), *pins.room(tenant)

    def _record_outcome(
        self, sequence: SequenceState, outcome: SaveOutcome, room: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        """Note what the client is told. ``room``: see ``_room``."""
        needed, held, budget = (blocks * self._cache.block_size for blocks in room)
        sequence.save_result = SaveResult(outcome, needed, held, budget)
        self._meters.saves[outcome] += 1
        if outcome not in ("saved", "present"):
            pins = self._cache.pins
            _log.warning(
                "request %s: its prompt was not saved (%s); %d of %d blocks are pinned",
                sequence.request.request_id, outcome, pins.blocks, pins.budget_blocks,
            )  # fmt: skip
