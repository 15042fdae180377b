"""Send a generation to a replica and receive its tokens; owns retries, and the mapping of Ray's errors to clients'."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc
import numpy as np
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from router.core import RoutingCore
from router.protocol.block_hash import extend_chain
from router.protocol.request import Decision, NoReplicaLeft, RoutedRequest
from router.serve.recent_decisions import RecentDecisions
from serve_app.engine.protocol import FirstToken
from serve_app.errors import GenerationFailed, Overloaded, RateLimited
from serve_app.generation.call import Call, ReplicaLeaves, ReplicaLost, Reservation, queue_full, raise_for
from serve_app.generation.generation import Generation, TakeTokens, Tokens
from serve_app.replica import messages as wire
from serve_app.replica.token_channel import TokenInbox
from serve_app.tracing.request import call_trace
from serve_app.tracing.tracer import Tracer

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Losses of one generation before it fails: more replicas that die at once are an outage."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
"""Range of the pauses before a generation is sent again while all queues are full or no replica exists."""

Delivered = Callable[[Generation, Decision, FirstToken, float], None]
"""Called with the seconds from the call to the first token."""

OnAbandoned = Callable[[str, str, Generation | None], None]
"""Called with the id of a replica, that of an abandoned call there, and its generation if it has no first token."""


@dataclass(eq=False)
class Dispatcher:
    """Streams generations from the replicas behind one Serve ``handle``.

    ``count_retry(after_first_token)`` is called for each retry, ``delivered``, which must be cheap, for each first
    token, ``left`` for each call abandoned before its answer, or too late for one. ``caller``: the name of this actor.
    """

    handle: DeploymentHandle
    core: RoutingCore
    decisions: RecentDecisions
    block_size: int
    count_retry: Callable[[bool], None]
    caller: str
    inbox: TokenInbox
    tracer: Tracer | None = None
    delivered: Delivered | None = None
    left: OnAbandoned | None = None
    _ends: set[asyncio.Future[bytes]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.handle = self.handle.options(method_name="generate")

    async def generate(
        self, generation: Generation, avoid: tuple[str, ...] = (), *, take: TakeTokens | None = None
    ) -> AsyncGenerator[Tokens, None]:
        """Yield the sequence's tokens as they arrive. ``avoid``: replicas to use only if no other can take it.

        Tokens that ``take`` takes are not yielded; its errors are raised here.

        After a replica's death another one gets the prompt and the tokens so far: a token depends only on (seed,
        position), so the stream continues. Full queues are tried again until the deadline, and so is a deployment
        without replicas once the stream has begun. A replica that leaves in order, after sending tokens, is no loss.
        One with more load than the router knew returns the generation with its load. Raises a ``WarmpathError`` if the
        generation is impossible.
        """
        received: list[int] = []
        dead: tuple[str, ...] = ()
        begun = False
        told = 0  # tokens of the prompt with reported log-probabilities
        losses = refusals = moves = rerouted = 0

        # The short way of a token: it is written to the client inside the callback that received it. Waking this
        # generator and those around it for each token costs more than all else about it. What begins or ends the
        # stream, or changes where it goes, needs the state below and takes the long way.
        def at_once(chunk: wire.GenerateChunk) -> bool:
            if take is None or chunk.first is not None or chunk.finish_reason is not None or chunk.prompt_logprobs:
                return False
            taken = take(Tokens(chunk.token_ids, logprobs=chunk.logprobs))
            if taken:
                received.extend(chunk.token_ids)
            return taken

        while losses < MAX_ATTEMPTS:
            current = _resumed(generation, received, self.block_size) if received else generation
            route = route_of(current, losses + refusals + moves + rerouted, avoid, dead, rerouted)
            reservation = Reservation(self.core, self.decisions, route)
            had, again = len(received), told
            try:
                async with self._call(current, route, reservation, at_once) as call:
                    while True:
                        chunk = await call.chunk()
                        if chunk.error == "unavailable":
                            raise ReplicaLeaves(chunk.message)
                        if chunk.load is not None:
                            reservation.end(load=chunk.load)
                            rerouted += 1
                            break
                        raise_for(chunk, generation.grammar_field)
                        received.extend(chunk.token_ids)
                        first = None if begun else chunk.first
                        begun = begun or first is not None
                        news = chunk.prompt_logprobs[again:]
                        again, told = max(0, again - len(chunk.prompt_logprobs)), told + len(news)
                        yield Tokens(chunk.token_ids, first, chunk.finish_reason, chunk.logprobs, news)
                        if chunk.finish_reason is not None:
                            return
            except (RateLimited, Overloaded) as error:
                # The request was admitted, and its other choices may be running: this one waits for a replica. If
                # there is none, a client without any tokens gets the error; a client with some could not ask for the
                # rest.
                if isinstance(error, Overloaded) and not received:
                    raise
                pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(refusals, 10))
                if time.perf_counter() + pause_s >= generation.deadline_s:
                    raise
                refusals += 1
                await asyncio.sleep(pause_s)
                self.core.counters.wait_s.observe(pause_s)
            except ReplicaLost as error:
                lost = reservation.replica_id
                logger.warning("replica %s lost request %s: %s", lost or "?", generation.request_id, error)
                if lost:
                    avoid = (*avoid, lost)
                    if not isinstance(error, ReplicaLeaves):
                        dead = (*dead, lost)
                if received and received[-1] in generation.sampling.shown_stop_token_ids:
                    yield Tokens((), None, "stop")
                    return
                if len(received) >= generation.sampling.max_tokens and (begun or generation.reads_kv):
                    yield Tokens((), None, "length")
                    return
                if isinstance(error, ReplicaLeaves) and len(received) > had:
                    moves += 1
                else:
                    losses += 1
                if losses < MAX_ATTEMPTS:
                    self.count_retry(bool(received))
        raise Overloaded(
            "Every replica that was given this request went away; send it again.",
            code="replicas_lost",
            retry_after_s=2.0,
        )

    @asynccontextmanager
    async def _call(
        self,
        generation: Generation,
        route: RoutedRequest,
        reservation: Reservation,
        at_once: Callable[[wire.GenerateChunk], bool],
    ) -> AsyncIterator[Call]:
        """One call to one replica; ends its reservation at the first token, or when the call ends."""
        started_s = time.perf_counter()
        trace = call_trace(self.tracer, generation.traceparent, route.request_id)
        message = wire.GenerateCall(
            request=generation.engine_request(route.request_id, started_s),
            caller=self.caller,
            reply_to=self.inbox.reply_to,
            lora_path=generation.lora_path,
            interval_s=generation.interval_s,
            grammar=generation.grammar,
            traceparent="" if trace is None else trace.traceparent,
            session=generation.session,
        )

        unanswered = None if generation.resumed_tokens else generation

        def first_token(first: FirstToken) -> None:
            nonlocal unanswered
            unanswered = None
            ttft_s = time.perf_counter() - started_s
            reservation.delivered(first.cached_tokens, ttft_s)
            if self.delivered is not None and reservation.decision is not None:
                self.delivered(generation, reservation.decision, first, ttft_s)

        call: Call | None = None
        with self.inbox.arrivals(route.request_id) as arrivals:
            arrivals.at_once = at_once
            try:
                response = self.handle.remote(wire.encode(message), route=route, decision=None)
                end = asyncio.ensure_future(response)
                self._ends.add(end)
                end.add_done_callback(self._heard)
                end.add_done_callback(lambda _: arrivals.wake())
                call = Call(arrivals, response, end, first_token, trace)
                yield call
            except BackPressureError as error:
                raise queue_full(1.0) from error
            except DeploymentUnavailableError as error:
                raise Overloaded("The deployment is not available now.", retry_after_s=5.0) from error
            except NoReplicaLeft as error:
                raise Overloaded("There is no replica now; send the request again later.", retry_after_s=5.0) from error
            except RayActorError as error:
                raise ReplicaLost(type(error).__name__) from error
            except RayTaskError as error:
                logger.exception("replica call failed for request %s", generation.request_id)
                raise GenerationFailed("The replica failed while generating this answer.") from error
            except (RayError, grpc.RpcError) as error:
                # Ray lost the call, not the replica's code: another replica can continue from the received tokens.
                raise ReplicaLost(type(error).__name__) from error
            finally:
                if ended := call is not None and call.answered:
                    reservation.end()
                else:
                    if call is not None:
                        call.cancel()
                    reservation.end(leaves=True)
                late = call is not None and call.late and unanswered is not None
                if self.left is not None and reservation.replica_id and (late or not ended):
                    self.left(reservation.replica_id, route.request_id, unanswered)
                if trace is not None:
                    trace.end(reservation.decision)

    def _heard(self, end: asyncio.Future[bytes]) -> None:
        self._ends.discard(end)
        if not end.cancelled():
            end.exception()  # marks it as retrieved, so that an abandoned call's error is not logged


def route_of(
    generation: Generation,
    attempt: int = 0,
    avoid: tuple[str, ...] = (),
    dead: tuple[str, ...] = (),
    rerouted: int = 0,
) -> RoutedRequest:
    """Return a generation's routing view. ``dead``: lost ones of ``avoid``; ``rerouted``: times it was sent back."""
    return RoutedRequest(
        request_id=f"{generation.request_id}.{attempt}",
        block_hashes=generation.block_hashes,
        prompt_tokens=len(generation.token_ids),
        placement_key=generation.placement_key,
        avoid=avoid,
        adapter=generation.scope.lora,
        tenant=generation.tenant,
        rerouted=rerouted,
        store_kv=generation.store_kv,
        dead=dead,
        order=generation.order,
        reads_kv=generation.reads_kv,
    )


def _resumed(generation: Generation, received: list[int], block_size: int) -> Generation:
    """Return the generation with the received tokens moved into the prompt, and counted as the answer's."""
    token_ids = np.concatenate([generation.token_ids, np.asarray(received, dtype=np.int32)])
    public_blocks = generation.scope.public_blocks
    hashes = extend_chain(generation.root, public_blocks, token_ids, block_size, generation.block_hashes)
    left = generation.sampling.max_tokens - len(received)
    sampling = replace(generation.sampling, max_tokens=left, prompt_logprobs=None)  # the prompt's are told already
    more = replace(generation, token_ids=token_ids, block_hashes=hashes, sampling=sampling)
    # Its client is reading already: it waits no longer than one of the default order.
    return replace(more, resumed_tokens=len(received), order=min(generation.order, 0))
