"""Tells replicas which of their calls nobody waits for any more.

Cancelling a call is Ray's, and at once; it loses one in some thousands, of those that are cancelled in the moment in
which they start, and that one would run to its end.
"""

from __future__ import annotations

import asyncio
import logging

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from router.protocol.request import NoReplicaLeft

logger = logging.getLogger(__name__)

TELL_AFTER_S = 0.5
"""Calls that are left within it are told together."""

TELL_TIMEOUT_S = 30.0


class Aborts:
    """Collects the calls that were left, by replica; with none there is nothing to do. One event loop uses it."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._end_calls = handle.options(method_name="end_calls")
        self._by_replica: dict[str, list[str]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def note(self, replica_id: str, request_id: str) -> None:
        """Have a replica told before long that nobody waits for a call."""
        if not self._by_replica:
            task = asyncio.get_running_loop().create_task(self._tell())
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)
        self._by_replica.setdefault(replica_id, []).append(request_id)

    async def _tell(self) -> None:
        await asyncio.sleep(TELL_AFTER_S)
        left, self._by_replica = self._by_replica, {}
        await asyncio.gather(*(self._tell_one(replica_id, ids) for replica_id, ids in left.items()))

    async def _tell_one(self, replica_id: str, request_ids: list[str]) -> None:
        try:
            async with asyncio.timeout(TELL_TIMEOUT_S):
                await self._end_calls.remote(request_ids, target=replica_id)
        except (RayError, RayServeException, NoReplicaLeft, TimeoutError) as error:
            logger.debug("replica %s was not told of calls that were left: %r", replica_id, error)
