"""The document of GET /v1/cache/sessions: the sessions of all replicas, collected on request."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.errors import Overloaded
from serve_app.sessions.report import MOST_TOLD

TIMEOUT_S = 5.0
FRESH_S = 1.0
"""The lifetime of an answer: repeated requests share it, so no client can keep replicas busy."""


class SessionList:
    """Collects and caches the session lists. ``replicas``: calls a method of every replica."""

    def __init__(self, replicas: Callable[..., Awaitable[list[Any]]]) -> None:
        self._replicas = replicas
        self._asked: dict[str | None, tuple[float, asyncio.Task[dict[str, Any]]]] = {}

    async def of(self, viewer: str | None) -> dict[str, Any]:
        """Return the document for a tenant, or (None) for an operator. Raises Overloaded if a replica is silent."""
        now_s = time.monotonic()
        self._asked = {
            one: (asked_s, answer)
            for one, (asked_s, answer) in self._asked.items()
            if not answer.done() or now_s - asked_s < FRESH_S
        }
        if viewer not in self._asked:
            self._asked[viewer] = now_s, asyncio.create_task(self._ask(viewer))
        return await asyncio.shield(self._asked[viewer][1])  # other requests wait for it, too

    async def _ask(self, viewer: str | None) -> dict[str, Any]:
        try:
            reports = await self._replicas("sessions", viewer, timeout_s=TIMEOUT_S)
        except TimeoutError as error:
            raise Overloaded("A replica does not report its sessions; ask again.", retry_after_s=5.0) from error
        rows = [{"replica": report["replica"], **row} for report in reports for row in report["rows"]]
        return {
            "object": "cache.sessions",
            "viewer": "operator" if viewer is None else "tenant",
            "tenant": viewer,
            "replicas": [{name: value for name, value in report.items() if name != "rows"} for report in reports],
            "sessions": sorted(rows, key=lambda row: float(row["idle_s"]))[:MOST_TOLD],
        }
