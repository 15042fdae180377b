"""Send a generation to a replica and receive its tokens; owns retries, and the mapping of Ray's errors to clients'.

``Call`` is one call to a replica, with its reservation; ``Aborts`` tells replicas about abandoned ones.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc
import numpy as np
from msgspec import structs
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from router.core import RoutingCore
from router.protocol.block_hash import extend_chain
from router.protocol.events import LoadReport
from router.protocol.request import Decision, NoReplicaLeft
from router.serve.core_registry import RecentDecisions
from serve_app.engine.protocol import EngineOutput, EngineRequest, FirstToken, Prefilled, TakeAtOnce, output_of_wire
from serve_app.engine.token_channel import Arrivals, TokenInbox
from serve_app.errors import GenerationFailed, Overloaded, RateLimited
from serve_app.generation.answer import queue_full, raise_for
from serve_app.ray_compat import cancel_call
from serve_app.tracing import CallTrace, Tracer

logger = logging.getLogger(__name__)

LATE_S = 5.0
"""How long to wait, after a call's end is known, for tokens that were sent before it."""

TELL_AFTER_S = 0.5
"""Abandoned calls within this time are reported together."""


@dataclass(slots=True, eq=False)
class Reservation:
    """The router's reservation for a call, until its first token or its end. ``decision``: the router's, once ended."""

    _core: RoutingCore
    _decisions: RecentDecisions
    _request: EngineRequest
    _ended: bool = False
    decision: Decision | None = None

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

    def corrected(self, cached_tokens: int) -> None:
        """Count so many more reused tokens, which the replica learned after the first token."""
        if self.decision is not None:
            self._core.recount_delivered(self.decision, cached_tokens)

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


Delivered = Callable[[EngineRequest, Decision, FirstToken, float], None]
"""Called with the seconds from the call to the first token."""

OnAbandoned = Callable[[str, str, EngineRequest | None], None]
"""Called with the id of a replica, that of an abandoned call there, and its generation if it has no first token."""


@dataclass(eq=False)
class Call:
    """One call's outputs as they arrive. ``answered``: its last or an error was read; ``late``: its time was over.

    ``end``: the bytes of ``response``. ``delivered`` are called with the first token's facts; ``begun``: they were.
    """

    generation: EngineRequest
    reservation: Reservation
    delivered: Sequence[Delivered]
    trace: CallTrace | None
    arrivals: Arrivals
    response: DeploymentResponse[bytes]
    end: asyncio.Future[bytes]
    started_s: float
    answered: bool = False
    late: bool = False
    begun: bool = False

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
            self._begin(output.first)
        if self.trace is not None:
            self.trace.saw(output.first, output.error or output.finish_reason)
        self.answered = bool(output.error or output.finish_reason)
        self.late = output.error == "timeout"
        return output

    def _begin(self, first: FirstToken) -> None:
        if first.correction:
            self.reservation.corrected(first.cached_tokens)
            return
        self.begun = True
        ttft_s = time.perf_counter() - self.started_s
        self.reservation.delivered(first.cached_tokens, ttft_s)
        if self.reservation.decision is not None:
            for observe in self.delivered:
                observe(self.generation, self.reservation.decision, first, ttft_s)

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


class ModelReplaced(Overloaded):
    """The replica has another model than this ingress, under the same name."""


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


REPLACED = "The model is being replaced by another one of this name; send the request again."

MAX_ATTEMPTS, AT_ONCE_S = 4, 60.0
"""Losses of one generation within this time before it fails: more replicas that die at once are an outage."""
MOST_LOSSES = 10
"""In all: a request that kills its replicas, one after another, must not kill them for as long as it may take."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
"""Range of the pauses before a generation is sent again while all queues are full or no replica exists."""


@dataclass(slots=True)
class _Progress:
    """One generation over all its attempts: what was received, what was passed on, and where it may not go again.

    ``begun``: the facts of a first token were passed on; ``logprobs``: so many of the prompt's log-probabilities were.
    Each attempt begins with ``had`` tokens, and ``repeated`` log-probabilities of the prompt come again.
    """

    generation: EngineRequest
    avoid: tuple[str, ...]
    dead: tuple[str, ...] = ()
    received: list[int] = field(default_factory=list)
    begun: bool = False
    logprobs: int = 0
    had: int = 0
    repeated: int = 0
    lost_at_s: list[float] = field(default_factory=list)
    refusals: int = 0
    moves: int = 0
    rerouted: int = 0

    def attempt(self, block_size: int) -> EngineRequest:
        """Begin an attempt; return what to send."""
        generation = self.generation
        self.had, self.repeated = len(self.received), self.logprobs
        return structs.replace(
            _resumed(generation, self.received, block_size) if self.received else generation,
            request_id=f"{generation.request_id}.{len(self.lost_at_s) + self.refusals + self.moves + self.rerouted}",
            avoid=self.avoid, dead=self.dead, rerouted=self.rerouted,
        )  # fmt: skip

    def passed_on(self, output: EngineOutput) -> EngineOutput:
        """Count an output, and leave out what an earlier attempt has passed on."""
        self.received.extend(output.token_ids)
        if self.begun and not (output.first is not None and output.first.correction and not self.had):
            output.first = None
        self.begun = self.begun or output.first is not None
        new = output.prompt_logprobs[self.repeated :]
        self.repeated = max(0, self.repeated - len(output.prompt_logprobs))
        self.logprobs += len(new)
        output.prompt_logprobs = new
        return output

    def lost(self, replica_id: str, error: ReplicaLost) -> EngineOutput | None:
        """Count a lost call; return the last output if the answer was complete before, None if it is to go on."""
        generation, received = self.generation, self.received
        logger.warning("replica %s lost request %s: %s", replica_id or "?", generation.request_id, error)
        if replica_id:
            self.avoid = (*self.avoid, replica_id)
            if not isinstance(error, ReplicaLeaves):
                self.dead = (*self.dead, replica_id)
        if received and received[-1] in generation.sampling.shown_stop_token_ids:
            return EngineOutput(generation.request_id, finish_reason="stop")
        if len(received) >= generation.sampling.max_tokens and (self.begun or generation.reads_kv):
            return EngineOutput(generation.request_id, finish_reason="length")
        if isinstance(error, ReplicaLeaves) and len(received) > self.had:
            self.moves += 1
        else:
            self.lost_at_s.append(time.perf_counter())
        return None

    def hopeless(self) -> bool:
        """Return whether too many replicas were lost."""
        lost_at_s = self.lost_at_s
        many = len(lost_at_s) >= MAX_ATTEMPTS and lost_at_s[-1] - lost_at_s[-MAX_ATTEMPTS] < AT_ONCE_S
        return many or len(lost_at_s) >= MOST_LOSSES


@dataclass(eq=False)
class Dispatcher:
    """Streams generations from the replicas behind one Serve ``handle``.

    ``count_retry(after_first_token)`` is called for each retry, ``delivered``, which must be cheap, are for each first
    token, ``left`` for each call abandoned before its answer, or too late for one. ``caller``: the name of this actor.
    ``starting``: whether replicas are, so that requests may wait for them.
    """

    handle: DeploymentHandle
    core: RoutingCore
    decisions: RecentDecisions
    block_size: int
    count_retry: Callable[[bool], None]
    caller: str
    inbox: TokenInbox
    tracer: Tracer | None = None
    delivered: Sequence[Delivered] = ()
    left: OnAbandoned | None = None
    starting: Callable[[], Awaitable[bool]] | None = None
    _ends: set[asyncio.Future[bytes]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.handle = self.handle.options(method_name="generate")

    async def generate(
        self, generation: EngineRequest, avoid: tuple[str, ...] = (), *, at_once: TakeAtOnce | None = None
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the request's outputs as they arrive. ``avoid``: replicas to use only if no other can take it.

        Outputs that ``at_once`` takes are not yielded; its errors are raised here.

        After a replica's death another one gets the prompt and the tokens so far: a token depends only on (seed,
        position), so the stream continues. Full queues are tried again until the deadline, and so is a deployment
        without replicas once the stream has begun. A replica that leaves in order, after sending tokens, is no loss.
        One with more load than the router knew returns the generation with its load. Raises a ``WarmpathError`` if the
        generation is impossible.
        """
        progress = _Progress(generation, avoid)

        # The short way of a token: it is written to the client inside the callback that received it. Waking this
        # generator and those around it for each token costs more than all else about it. What begins or ends the
        # stream, or changes where it goes, needs the state below and takes the long way.
        def short_way(output: EngineOutput) -> bool:
            if output.first is not None or output.finish_reason is not None or output.prompt_logprobs:
                return False
            if at_once is None or not at_once(output):
                return False
            progress.received.extend(output.token_ids)
            return True

        while not progress.hopeless():
            attempt = progress.attempt(self.block_size)
            reservation = Reservation(self.core, self.decisions, attempt)
            try:
                async with self._call(attempt, reservation, short_way) as call:
                    while True:
                        output = await call.output()
                        if output.load is not None:
                            reservation.end(load=output.load)
                            progress.rerouted += 1
                            break
                        if output.error:
                            _raise_for(output, generation.grammar_field)
                        yield progress.passed_on(output)
                        if output.finish_reason is not None:
                            return
            except (RateLimited, Overloaded) as error:
                await self._wait(progress, error, reservation.replica_id)
            except ReplicaLost as error:
                last = progress.lost(reservation.replica_id, error)
                if last is not None:
                    yield last
                    return
                if not progress.hopeless():
                    self.count_retry(bool(progress.received))
        raise Overloaded(
            "Every replica that was given this request went away; send it again.",
            code="replicas_lost",
            retry_after_s=2.0,
        )

    async def _wait(self, progress: _Progress, error: RateLimited | Overloaded, replica_id: str) -> None:
        """Wait before a refused generation is sent again. Raises the refusal if it must not be."""
        # The request was admitted, and its other choices may be running: this one waits for a replica. If there is
        # none, a client without any tokens gets the error; a client with some could not ask for the rest.
        if isinstance(error, Overloaded):
            replaced = isinstance(error, ModelReplaced)
            if (replaced or not progress.received) and not (self.starting and await self.starting()):
                raise error
            if replaced and replica_id not in progress.avoid:
                progress.avoid = (*progress.avoid, replica_id)
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(progress.refusals, 10))
        if time.perf_counter() + pause_s >= progress.generation.deadline_s:
            raise error
        progress.refusals += 1
        await asyncio.sleep(pause_s)
        self.core.counters.wait_s.observe(pause_s)

    @asynccontextmanager
    async def _call(
        self, generation: EngineRequest, reservation: Reservation, at_once: TakeAtOnce
    ) -> AsyncIterator[Call]:
        """One call to one replica; ends its reservation at the first token, or when the call ends."""
        started_s = time.perf_counter()
        trace: CallTrace | None = None
        if self.tracer is not None and generation.traceparent:
            trace = CallTrace(self.tracer, generation.traceparent, generation.request_id)
        request = structs.replace(
            generation,
            caller=self.caller,
            reply_to=self.inbox.reply_to,
            timeout_s=generation.deadline_s - started_s,
            traceparent="" if trace is None else trace.traceparent,
        )
        call: Call | None = None
        with self.inbox.arrivals(request.request_id) as arrivals:
            arrivals.at_once = at_once
            try:
                response = self.handle.remote(request)
                end = asyncio.ensure_future(response)
                self._ends.add(end)
                end.add_done_callback(self._ended)
                end.add_done_callback(arrivals.wake)
                call = Call(generation, reservation, self.delivered, trace, arrivals, response, end, started_s)
                yield call
            except (BackPressureError, DeploymentUnavailableError, NoReplicaLeft, RayError, grpc.RpcError) as error:
                raise _meaning_of(error, generation.request_id) from error
            finally:
                if ended := call is not None and call.answered:
                    reservation.end()
                else:
                    if call is not None:
                        call.cancel()
                    reservation.end(leaves=True)
                begun = generation.resumed_tokens or (call is not None and call.begun)
                unanswered = None if begun else generation
                late = call is not None and call.late and unanswered is not None
                if (late or not ended) and self.left is not None and reservation.replica_id:
                    self.left(reservation.replica_id, request.request_id, unanswered)
                if trace is not None:
                    trace.end(reservation.decision)

    def _ended(self, end: asyncio.Future[bytes]) -> None:
        self._ends.discard(end)
        if not end.cancelled():
            end.exception()  # marks it as retrieved, so that an abandoned call's error is not logged


def _raise_for(output: EngineOutput, grammar_field: str) -> None:
    """Raise what an output with an error means: another replica may go on, or the client's error."""
    if output.error == "unavailable":
        raise ReplicaLeaves(output.message)
    if output.error == "other_model":
        raise ModelReplaced(REPLACED, code="model_starting", retry_after_s=1.0)
    raise_for(output, grammar_field)


def _meaning_of(error: Exception, request_id: str) -> Exception:
    """Return what an error of Ray means for a call: the client's error, or that another replica may go on."""
    match error:
        case BackPressureError():
            return queue_full(1.0)
        case DeploymentUnavailableError():
            return Overloaded("The deployment is not available now.", retry_after_s=5.0)
        case NoReplicaLeft():
            return Overloaded("There is no replica now; send the request again later.", retry_after_s=5.0)
        case RayTaskError() if not isinstance(error, RayActorError):
            logger.exception("replica call failed for request %s", request_id)
            return GenerationFailed("The replica failed while generating this answer.")
        case _:
            # Ray lost the call, not the replica's code: another replica can continue from the received tokens.
            return ReplicaLost(type(error).__name__)


def _resumed(generation: EngineRequest, received: list[int], block_size: int) -> EngineRequest:
    """Return the generation with the received tokens moved into the prompt, and counted as the answer's."""
    new_ids = np.asarray(received, dtype=np.int32)
    token_ids, identity = (np.concatenate([ids, new_ids]) for ids in (generation.token_ids, generation.identity))
    public_blocks = generation.scope.public_blocks
    hashes = extend_chain(generation.root, public_blocks, identity, block_size, generation.block_hashes)
    left = generation.sampling.max_tokens - len(received)
    sampling = replace(generation.sampling, max_tokens=left, prompt_logprobs=None)  # the prompt's are told already
    return structs.replace(
        generation, token_ids=token_ids, hashed_ids=identity if generation.hashed_ids is not None else None,
        block_hashes=hashes, sampling=sampling, resumed_tokens=len(received),
        order=min(generation.order, 0),  # its client is reading already: it waits no longer than the default order
    )  # fmt: skip
