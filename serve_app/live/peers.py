"""What the other ingresses decide, while somebody watches here: asked for once a second, forgotten with the watcher.

Whoever is asked keeps its latest events for ``LEASE_S`` more: who asks no more costs nothing soon after.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from serve_app.live.nodes import Key, NodeRow
from serve_app.live.view import Told, Total

logger = logging.getLogger(__name__)

LEASE_S = 5.0
ASK_TIMEOUT_S = 2.0

Cursors = dict[str, tuple[int, int]]
"""By ingress the number of its latest event that is known, and the version of its rows."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One ingress' answer. ``keys``: of all its rows; ``rows``: those that are new; ``number``, ``version``: cursor."""

    ingress: str
    number: int
    version: int
    told: list[Told]
    rows: list[NodeRow]
    keys: list[Key]
    totals: dict[str, Total]


@dataclass(slots=True)
class _Peer:
    number: int = 0
    version: int = 0
    rows: dict[Key, NodeRow] = field(default_factory=dict)
    totals: dict[str, Total] = field(default_factory=dict)


class Peers:
    """The other ingresses. ``ingresses``: calls a method of every one, this one too; nothing without others."""

    def __init__(self, name: str, ingresses: Callable[..., Awaitable[list[Any]]]) -> None:
        self._name = name
        self._ingresses = ingresses
        self._peers: dict[str, _Peer] = {}

    @property
    def rows(self) -> list[dict[Key, NodeRow]]:
        """Their rows, by ingress."""
        return [peer.rows for peer in self._peers.values()]

    @property
    def totals(self) -> list[dict[str, Total]]:
        """Their totals, by ingress."""
        return [peer.totals for peer in self._peers.values()]

    async def ask(self) -> list[Told]:
        """Learn what is new, and return what happened; nothing where they cannot be asked now."""
        cursors: Cursors = {name: (peer.number, peer.version) for name, peer in self._peers.items()}
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                batches: list[Batch] = await self._ingresses("recent_events", cursors, timeout_s=ASK_TIMEOUT_S)
        except Exception:  # one of them may just be going
            logger.debug("the other ingresses do not tell what they decide", exc_info=True)
            return []
        others = [batch for batch in batches if batch.ingress != self._name]
        self._peers = {batch.ingress: self._peers.get(batch.ingress, _Peer()) for batch in others}
        for batch in others:
            peer = self._peers[batch.ingress]
            known = {**peer.rows, **{(row.tenant or "", row.id): row for row in batch.rows}}
            peer.rows = {key: known[key] for key in batch.keys if key in known}
            peer.number, peer.version, peer.totals = batch.number, batch.version, batch.totals
        return [told for batch in others for told in batch.told]

    def forget(self) -> None:
        """Forget all of it."""
        self._peers.clear()
