"""Weights of tenants in the database on their way to the replicas, which have no database: a notice on the board.

Every ingress posts what it reads there; every replica looks regularly, so that one that starts later knows them too.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn

from serve_app.errors import Overloaded
from serve_app.notices import post, read
from serve_app.tenancy.registry import TenantRegistry
from serve_app.tenants import name_of

logger = logging.getLogger(__name__)

KIND = "tenant weights"
LOOK_S = 2.0
"""The time between two looks."""

Weights = Mapping[str, float]


def stored_weights(registry: TenantRegistry) -> dict[str, float] | None:
    """Return the weights of tenants that operators added, or gave another share; None: nothing was read yet."""
    try:
        stored = registry.document.tenants
    except Overloaded:
        return None

    def differs(life: str) -> bool:
        name = name_of(life)
        override = stored.get(name)
        return name != life or (override is not None and (override.added or "cache_share" in override.fields))

    return {one.name: one.cache_share for one in registry.tenants if differs(one.name)}


async def post_weights(board: str, registry: TenantRegistry) -> NoReturn:
    """Post an ingress' weights on a model's board whenever they change, and once at the start."""
    posted: Weights | None = None
    while True:
        weights = stored_weights(registry)
        if weights is not None and weights != posted:
            await asyncio.to_thread(post, board, KIND, "", {"weights": weights})
            posted = weights
        await asyncio.sleep(LOOK_S)


class TenantWeights:
    """A replica's weights of tenants: those of the settings, and over them those of the database.

    ``use``: puts all of them in force; they replace the ones before.
    """

    def __init__(self, declared: Weights, use: Callable[[Weights], Awaitable[None]]) -> None:
        self._declared = declared
        self._stored: Weights = {}
        self._use = use
        self._one_at_a_time = asyncio.Lock()

    async def declare(self, weights: Weights) -> None:
        """Use other settings' weights."""
        self._declared = weights
        await self._use_both()

    async def follow(self, board: str) -> NoReturn:
        """Use the weights on a model's board, as they change."""
        used: Weights | None = None
        while True:
            notices = await asyncio.to_thread(read, board, KIND)
            self._stored = notices[0]["weights"] if notices else {}
            if self._stored != used:
                await self._use_both()
                used = self._stored
            await asyncio.sleep(LOOK_S)

    async def _use_both(self) -> None:
        async with self._one_at_a_time:
            await self._use({**self._declared, **self._stored})
