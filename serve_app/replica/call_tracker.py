"""The calls that each ingress has at this replica, which end when that ingress has died, or says that nobody waits.

With calls between actors Ray lets a streaming call run on after its caller's death. Whether an ingress lives is asked
of Ray, not of the ingress: one that is busy is not dead. And of the calls that are cancelled in the moment in which
they start Ray loses one in some thousands: it runs on, so the ingress says so once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from ray.exceptions import RayError

from serve_app.ray_compat import find_serve_actor

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0

_MAX_LEFT = 8192
"""So many calls that nobody waits for are kept in mind, for those that have not arrived."""


def actor_lives(name: str) -> bool:
    """Return False once Ray knows that a Serve actor of that name has died; while Ray does not answer, it lives.

    A caller without a name is no actor, and nobody can tell.
    """
    if not name:
        return True
    try:
        find_serve_actor(name)
    except ValueError:
        return False
    except RayError:
        logger.warning("Ray does not say whether %s lives", name, exc_info=True)
    return True


class CallTracker:
    """Ids of the requests under way, by caller. ``cancel`` ends one; ``lives`` may block."""

    def __init__(self, cancel: Callable[[str], None], lives: Callable[[str], bool] = actor_lives) -> None:
        self._cancel = cancel
        self._lives = lives
        self._requests: dict[str, set[str]] = {}
        self._left: OrderedDict[str, None] = OrderedDict()

    def left(self, request_ids: Sequence[str]) -> None:
        """End requests that nobody waits for, also those that have not begun."""
        for request_id in request_ids:
            self._left[request_id] = None
            if len(self._left) > _MAX_LEFT:
                self._left.popitem(last=False)
        self._end_left()

    def began(self, caller: str, request_id: str) -> None:
        """Note a request under way."""
        self._requests.setdefault(caller, set()).add(request_id)

    def ended(self, caller: str, request_id: str) -> None:
        """Note the end of a request that began."""
        self._requests[caller].remove(request_id)
        self._left.pop(request_id, None)
        if not self._requests[caller]:
            del self._requests[caller]

    async def watch(self) -> None:
        """End for ever the requests of callers that died, and those that were left.

        What cannot be cancelled yet is cancelled the next time.
        """
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._end_left()
            for caller in list(self._requests):
                if await asyncio.to_thread(self._lives, caller):
                    continue
                requests = list(self._requests.get(caller, ()))
                logger.warning("%s died; %d of its requests end", caller, len(requests))
                for request_id in requests:
                    self._cancel(request_id)

    def _end_left(self) -> None:
        if self._left:
            for requests in self._requests.values():
                for request_id in requests & self._left.keys():
                    self._cancel(request_id)
