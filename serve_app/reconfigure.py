"""The settings in force in one Serve replica, of an ingress or of an engine, and how they change while it runs.

Serve kills a replica whose ``reconfigure`` raises: here a bad ``user_config`` changes nothing, and is put on the board.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ray import serve

from serve_app.config.app import AppConfig
from serve_app.config.live import NO_TENANTS, BadSettings, app_config, changed_salts, overlaid
from serve_app.notices import clear, post, remove
from serve_app.ray_compat import own_deployment

logger = logging.getLogger(__name__)

KIND = "configuration"
"""Of the notices that are posted here."""

Apply = Callable[[AppConfig], Awaitable[None]]
"""Puts settings into force. Where it raises, it has changed nothing."""


class LiveSettings:
    """``args`` overlaid with the newest good ``user_config``; ``config``: that, the settings in force.

    ``refused``: how many user_configs could not be used; ``why`` the newest could not, "" where it is in force. Raises
    BadSettings where the first cannot: a replica that starts has none to go on with.
    """

    def __init__(self, args: dict[str, Any]) -> None:
        context = serve.get_replica_context()
        self.args = app_config(args)
        # Serve calls `reconfigure` after the constructor, and an ingress' port may be open by then.
        self.config = overlaid(self.args, own_deployment().user_config)
        self.refused = 0
        self.why = ""
        self._app_name = context.app_name
        self._name = f"{context.deployment} {context.replica_id.unique_id}"
        self._lock = asyncio.Lock()

    @classmethod
    async def start(cls, args: dict[str, Any]) -> LiveSettings:
        """Return a starting replica's settings; notices of earlier mistakes are over. Raises BadSettings."""
        made = cls(args)
        await made._board(clear)
        return made

    async def reconfigure(self, user_config: Any, apply: Apply) -> bool:
        """Put a new ``user_config`` into force by ``apply``; False where it is refused. Never raises."""
        async with self._lock:
            before = self.config
            try:
                config = overlaid(self.args, user_config)
                if before.tenants and not config.tenants:
                    raise BadSettings([(("tenants",), NO_TENANTS)])
                if config != before:
                    await apply(config)
                self.config = config
            except Exception as error:
                self.refused += 1
                known = isinstance(error, BadSettings)
                self.why = str(error) if known else "a fault; the log has it"
                logger.error("a user_config changed nothing: %s", error, exc_info=None if known else error)
                await self._board(post, self._name, {"name": self._name, "accepted": False, "why": self.why})
                return False
            self.why = ""
            changed = changed_salts(before, config)
            if changed:
                what = f"in another trust group, out of reach of what they had cached: {', '.join(changed)}"
                logger.warning(what)
                await self._board(post, self._name, {"name": self._name, "accepted": True, "why": what})
            elif config != before or self.refused:
                await self._board(remove, self._name)
            return True

    async def _board(self, change: Callable[..., None], *arguments: Any) -> None:
        """Change the board of notices of this kind, if it can be reached."""
        try:
            await asyncio.to_thread(change, self._app_name, KIND, *arguments)
        except Exception:
            logger.exception("the notice board cannot be reached")
