"""Usage of one ingress and of all: own counts are written periodically, and merged with others' on request."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from router.background import run_in_background
from serve_app.usage.ledger import FLUSH_S, Ledger
from serve_app.usage.report import UsageRows, merged


class Ledgers:
    """Reads and writes usage. ``ingresses``: calls a method of all ingresses; returns nothing if there is only one."""

    def __init__(self, ledger: Ledger, ingresses: Callable[..., Awaitable[list[Any]]]) -> None:
        self._ledger = ledger
        self._ingresses = ingresses
        self._writing = run_in_background(self._write)

    async def here(self, first_day: str, last_day: str, tenant: str | None) -> tuple[str, UsageRows]:
        """Return the id of this ingress' file, and its rows from one day to another, of a tenant or (None) all."""
        return self._ledger.file_id, await asyncio.to_thread(self._ledger.read, first_day, last_day, tenant)

    async def everywhere(self, first_day: str, last_day: str, tenant: str | None) -> UsageRows:
        """Return the rows of all ingresses."""
        asked = first_day, last_day, tenant
        return merged(await self._ingresses("usage", *asked) or [await self.here(*asked)])

    async def flush(self) -> None:
        """Write the counts to the file."""
        await asyncio.to_thread(self._ledger.flush)

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()
