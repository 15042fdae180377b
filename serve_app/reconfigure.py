"""The settings in force in one Serve replica, an ingress or an engine, and their changes while it runs.

Serve kills a replica if ``reconfigure`` raises. So a bad ``user_config`` changes nothing here, and becomes a notice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ray import serve

from serve_app.config.app import REPLICAS, AppConfig
from serve_app.config.live import NO_TENANTS, BadSettings, app_config, changed_salts, of_model, overlaid
from serve_app.notices import board_name, clear, post, remove
from serve_app.ray_compat import own_deployment

logger = logging.getLogger(__name__)

KIND = "configuration"
"""The kind of this module's notices."""

Apply = Callable[[AppConfig], Awaitable[None]]
"""Applies settings. If it raises, it has changed nothing."""


class LiveSettings:
    """``args`` overlaid with the newest valid ``user_config``; ``config``: the result, the settings in force.

    ``refused``: the number of invalid user_configs; ``why``: the newest one's mistake, "" if it is in force. Raises
    BadSettings if the first one is invalid: a starting replica has no earlier settings.
    """

    def __init__(self, args: dict[str, Any]) -> None:
        context = serve.get_replica_context()
        self.args = app_config(args)
        # Serve calls `reconfigure` after the constructor, and an ingress' port may be open by then.
        self.one_of_several = context.deployment.startswith(f"{REPLICAS}-")
        self.config = self._overlaid(own_deployment().user_config)
        self.refused = 0
        self.why = ""
        self._board_name = board_name(context.app_name, context.deployment)
        self._name = f"{context.deployment} {context.replica_id.unique_id}"
        self._lock = asyncio.Lock()

    @classmethod
    async def start(cls, args: dict[str, Any]) -> LiveSettings:
        """Return a starting replica's settings, and clear notices of earlier mistakes. Raises BadSettings."""
        made = cls(args)
        await made._board(clear)
        return made

    async def reconfigure(self, user_config: Any, apply: Apply) -> bool:
        """Apply a new ``user_config`` with ``apply``; return False if it is refused. Never raises."""
        async with self._lock:
            before = self.config
            try:
                config = self._overlaid(user_config)
                if before.tenants and not config.tenants:
                    raise BadSettings([(("tenants",), NO_TENANTS)])
                if config != before:
                    await apply(config)
                self.config = config
            except Exception as error:
                self.refused += 1
                known = isinstance(error, BadSettings)
                self.why = str(error) if known else "an internal error; see the log"
                logger.error("a user_config changed nothing: %s", error, exc_info=None if known else error)
                await self._board(post, self._name, {"name": self._name, "accepted": False, "why": self.why})
                return False
            self.why = ""
            changed = changed_salts(before, config)
            if changed:
                why = f"in another trust group, without access to their earlier cache: {', '.join(changed)}"
                logger.warning(why)
                await self._board(post, self._name, {"name": self._name, "accepted": True, "why": why})
            elif config != before or self.refused:
                await self._board(remove, self._name)
            return True

    def _overlaid(self, user_config: Any) -> AppConfig:
        mine = of_model(user_config, self.args.model_name) if self.one_of_several else user_config
        return overlaid(self.args, mine)

    async def _board(self, change: Callable[..., None], *arguments: Any) -> None:
        """Change the notices of this kind, if the board can be reached."""
        try:
            await asyncio.to_thread(change, self._board_name, KIND, *arguments)
        except Exception:
            logger.exception("the notice board cannot be reached")
