"""One call to a replica: its reservation, its chunks and errors, and notices of abandoned calls."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from router.core import RoutingCore
from router.protocol.events import LoadReport
from router.protocol.request import Decision, NoReplicaLeft
from router.serve.recent_decisions import RecentDecisions
from serve_app.engine.protocol import EngineOutput, EngineRequest, FirstToken, Prefilled, output_of_wire
from serve_app.ray_compat import cancel_call
from serve_app.replica.token_channel import Arrivals
from serve_app.tracing.request import CallTrace

logger = logging.getLogger(__name__)

LATE_S = 5.0
"""How long to wait, after a call's end is known, for tokens that were sent before it."""

TELL_AFTER_S = 0.5
"""Abandoned calls within this time are reported together."""


class Reservation:
    """The router's reservation for a call, until its first token or its end. ``decision``: the router's, once ended."""

    def __init__(self, core: RoutingCore, decisions: RecentDecisions, request: EngineRequest) -> None:
        self._core = core
        self._decisions = decisions
        self._request = request
        self._ended = False
        self.decision: Decision | None = None

    @property
    def replica_id(self) -> str:
        """The replica that the router chose, "" if it chose none."""
        return self.decision.replica_id if self.decision is not None else ""

    def delivered(self, cached_tokens: int, ttft_s: float) -> None:
        """Count the reused tokens at the first token, and end the reservation."""
        if not self._ended:
            self.end()
            if self.decision is not None:
                hashes, stored = self._request.block_hashes, self._request.store_kv
                self._core.record_delivered(self.decision, cached_tokens, ttft_s, hashes, stored=stored)

    def end(self, *, leaves: bool = False, load: LoadReport | None = None) -> None:
        """End the reservation. ``leaves``: the call is abandoned. ``load``: of a replica that sent the call back."""
        if self._ended:
            return
        self._ended = True
        take = self._decisions.leave if leaves else self._decisions.take
        self.decision = take(self._request.request_id)
        if self.decision is None:
            return
        if load is None:
            self._core.release(self.decision)
        else:
            self._core.rerouted(self.decision, load)


@dataclass(eq=False)
class Call:
    """One call's outputs as they arrive. ``answered``: its last or an error was read; ``late``: its time was over.

    ``end``: the bytes of ``response``. ``first_token`` is called with the first token's facts.
    """

    arrivals: Arrivals
    response: DeploymentResponse[bytes]
    end: asyncio.Future[bytes]
    first_token: Callable[[FirstToken], None]
    trace: CallTrace | None
    answered: bool = False
    late: bool = False

    def cancel(self) -> None:
        """Tell the replica to end the call."""
        self.end.cancel()
        cancel_call(self.response)

    async def output(self) -> EngineOutput:
        """Wait for the next output. Raises ReplicaLost if tokens were lost in transit, and the call's own errors."""
        output = self.arrivals.take()
        while output is None:
            if self.end.done():
                output = await self._last()
            else:
                await self.arrivals.news()
                output = self.arrivals.take()
        if output.first is not None:
            self.first_token(output.first)
        if self.trace is not None:
            self.trace.saw(output.first, output.error or output.finish_reason)
        self.answered = bool(output.error or output.finish_reason)
        self.late = output.error == "timeout"
        return output

    async def _last(self) -> EngineOutput | None:
        """Return the call's result after all outputs sent before it; None if more outputs arrived first."""
        last = output_of_wire(self.end.result())
        if last.seq == self.arrivals.received:
            if not last.error and last.finish_reason is None:
                raise ReplicaLost("the stream ended without a finish reason")
            return last
        try:
            async with asyncio.timeout(LATE_S):
                await self.arrivals.news()
        except TimeoutError:
            raise ReplicaLost("tokens were lost on the way") from None
        return self.arrivals.take()


class ReplicaLost(Exception):
    """The replica is leaving or broke off; another one can continue the generation."""


class ReplicaLeaves(ReplicaLost):
    """The replica itself reports that it is leaving."""


class Aborts:
    """Tells replicas about abandoned calls. Used from one event loop.

    Ray's own cancellation loses one call in some thousands, at the moment of its start: it would run to its end. The
    replica answers how far it computed the prompt: ``charge`` is called with that for generations without an answer.
    """

    def __init__(
        self, handle: DeploymentHandle, charge: Callable[[EngineRequest, Prefilled], None] = lambda *_: None
    ) -> None:
        self._end_calls = handle.options(method_name="end_calls")
        self._charge = charge
        self._by_replica: dict[str, list[tuple[str, EngineRequest | None]]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def note(self, replica_id: str, request_id: str, unanswered: EngineRequest | None = None) -> None:
        """Tell a replica soon that a call is abandoned. ``unanswered``: its generation, if it has no first token."""
        if not self._by_replica:
            task = asyncio.get_running_loop().create_task(self._tell())
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)
        self._by_replica.setdefault(replica_id, []).append((request_id, unanswered))

    async def _tell(self) -> None:
        await asyncio.sleep(TELL_AFTER_S)
        left, self._by_replica = self._by_replica, {}
        await asyncio.gather(*(self._tell_one(replica_id, calls) for replica_id, calls in left.items()))

    async def _tell_one(self, replica_id: str, calls: list[tuple[str, EngineRequest | None]]) -> None:
        try:
            async with asyncio.timeout(30):
                done = await self._end_calls.remote([request_id for request_id, _ in calls], target=replica_id)
        except (RayError, RayServeException, NoReplicaLeft, TimeoutError) as error:
            logger.debug("replica %s was not told of abandoned calls: %r", replica_id, error)
            return
        for (_, unanswered), prefilled in zip(calls, done, strict=True):
            if unanswered is not None and prefilled is not None:
                self._charge(unanswered, prefilled)
