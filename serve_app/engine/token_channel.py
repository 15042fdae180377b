"""Tokens from replicas to an ingress: one encrypted message per step for each pair of them.

An ingress' calls carry the address of its socket. A replica never waits: an ingress too far behind loses its calls.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import msgspec
import zmq
from msgspec import structs

from router.feed.socket_reader import SocketReader
from serve_app.engine.protocol import EngineOutput, ReplyTo, TakeAtOnce, outputs_of_wire, to_wire

logger = logging.getLogger(__name__)

MAX_WAITING_MESSAGES = 512
"""Number of steps that an ingress may be behind, at each end of the connection."""
MAX_MESSAGE_BYTES = 16 << 20
"""A peer with a larger message is disconnected."""
MAX_AT_ONCE = 64
"""Number of messages that an ingress reads before it does anything else."""
MAX_INGRESSES = 64
"""Number of connections that a replica keeps; those to replaced ingresses are dropped first."""


class TokenSender:
    """The replica's end. Used from one thread."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._public_key, self._secret_key = zmq.curve_keypair()
        self._sockets: OrderedDict[ReplyTo, zmq.Socket[bytes]] = OrderedDict()

    def send(self, to: ReplyTo, outputs: Sequence[EngineOutput]) -> bool:
        """Send outputs to an ingress; return False if it is too far behind, or its address is invalid."""
        message = to_wire(outputs)
        if len(message) > MAX_MESSAGE_BYTES // 2 and len(outputs) > 1:  # long prompts' log-probabilities
            half = len(outputs) // 2
            return self.send(to, outputs[:half]) and self.send(to, outputs[half:])
        try:
            self._socket(to).send(message, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("tokens for the ingress at %s cannot be sent: %s", to.address, error)
            return False
        return True

    def close(self) -> None:
        """Close the connections; messages in transit have a second to arrive."""
        self._context.destroy(linger=1000)

    def _socket(self, to: ReplyTo) -> zmq.Socket[bytes]:
        socket = self._sockets.get(to)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            try:
                socket.setsockopt(zmq.SNDHWM, MAX_WAITING_MESSAGES)
                socket.setsockopt(zmq.LINGER, 1000)
                socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)  # ever longer pauses for an ingress that has ended
                socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public_key)
                socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret_key)
                socket.setsockopt(zmq.CURVE_SERVERKEY, to.public_key.encode())
                socket.connect(to.address)
            except zmq.ZMQError:
                socket.close(0)
                raise
            self._sockets[to] = socket
            if len(self._sockets) > MAX_INGRESSES:
                self._sockets.popitem(last=False)[1].close(0)
        self._sockets.move_to_end(to)
        return socket


class TokenStream:
    """Holds outputs back: at most one leaves per ``interval_s``, but first and last at once; ``saw`` gets each."""

    __slots__ = ("_due_s", "_interval_s", "_outputs", "_saw")

    def __init__(self, interval_s: float = 0.0, saw: Callable[[EngineOutput], None] | None = None) -> None:
        self._outputs: list[EngineOutput] = []
        self._interval_s = interval_s
        self._due_s = 0.0
        self._saw = saw

    def push(self, output: EngineOutput) -> EngineOutput | None:
        """Add one output; return all that may leave now as one output, None if they wait for more."""
        if self._saw is not None:
            self._saw(output)
        if output.prompt_logprobs:  # none of them waits, and the first token waits for none of them
            return output
        if self._interval_s:
            now_s = time.monotonic()
            if output.finish_reason is None and now_s < self._due_s:
                self._outputs.append(output)
                return None
            self._due_s = now_s + self._interval_s
        if not self._outputs:
            return output
        outputs = [*self._outputs, output]  # none of them is the request's first
        self._outputs.clear()
        token_ids = tuple(chain.from_iterable(each.token_ids for each in outputs))
        logprobs = tuple(chain.from_iterable(each.logprobs for each in outputs))
        return structs.replace(output, token_ids=token_ids, logprobs=logprobs)


class Arrivals:
    """Unread outputs of one call. ``received``: number of outputs that arrived, up to the first lost one.

    ``at_once`` is offered outputs that arrive while a reader waits, before it wakes; it returns whether it took them.
    """

    __slots__ = ("_news", "_outputs", "at_once", "received")

    def __init__(self) -> None:
        self._outputs: deque[EngineOutput] = deque()
        self._news: asyncio.Future[None] | None = None
        self.at_once: TakeAtOnce | None = None
        self.received = 0

    def add(self, output: EngineOutput) -> None:
        """Add an output; outputs behind a lost one are useless."""
        if output.seq == self.received:
            self.received += 1
            self._outputs.append(output)

    def hand_on(self) -> None:
        """Hand the added outputs to ``at_once``, or wake the waiting reader."""
        news = self._news
        if news is None or news.done() or not self._outputs:
            return
        if self.at_once is not None:
            # The reader waits, so nothing older is unread and the order holds. Until it runs, this is its place.
            output = self.take()
            assert output is not None, "there are some"
            try:
                if self.at_once(output):
                    return
            except Exception as error:  # raised in the waiting reader
                news.set_exception(error)
                return
            self._outputs.append(output)  # not taken: the reader gets it first, since nothing came in between
        news.set_result(None)

    def take(self) -> EngineOutput | None:
        """Return all waiting outputs as one, None if there are none. So a slow ingress handles fewer, larger ones."""
        if not self._outputs:
            return None
        first = last = self._outputs.popleft()
        if not self._outputs:
            return first
        token_ids, logprobs, prompt_logprobs = first.token_ids, first.logprobs, first.prompt_logprobs
        while self._outputs:
            last = self._outputs.popleft()
            token_ids += last.token_ids
            logprobs += last.logprobs
            prompt_logprobs += last.prompt_logprobs
            if last.first is not None:
                first = structs.replace(last, first=last.first.after(first.first))
        return structs.replace(
            first,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=last.finish_reason,
        )

    def wake(self, _: object = None) -> None:
        """End ``news``."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def news(self) -> None:
        """Wait for an output, or for ``wake``."""
        if not self._outputs:
            self._news = asyncio.get_running_loop().create_future()
            await self._news


class TokenInbox:
    """Calls of one ingress and their arrivals. ``reply_to``: the address in its calls. Used from one loop."""

    def __init__(self, reply_to: ReplyTo) -> None:
        self.reply_to = reply_to
        self._calls: dict[str, Arrivals] = {}

    @contextmanager
    def arrivals(self, call_id: str) -> Iterator[Arrivals]:
        """Collect a call's outputs within the block; outputs of other calls are dropped."""
        arrivals = self._calls[call_id] = Arrivals()
        try:
            yield arrivals
        finally:
            del self._calls[call_id]

    def deliver(self, *messages: Sequence[EngineOutput]) -> None:
        """Hand outputs to their readers; a call's outputs from several messages go together."""
        came: dict[str, Arrivals] = {}
        for output in chain.from_iterable(messages):
            arrivals = self._calls.get(output.request_id)
            if arrivals is not None:
                arrivals.add(output)
                came[output.request_id] = arrivals
        for arrivals in came.values():
            arrivals.hand_on()


class TokenReceiver:
    """The ingress' end: puts messages from its socket into ``inbox``."""

    def __init__(self, host: str) -> None:
        """Bind to a random port of ``host``, in the reading loop."""
        self._context = zmq.Context()
        socket = self._context.socket(zmq.PULL)
        public_key, secret_key = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
        socket.setsockopt(zmq.RCVHWM, MAX_WAITING_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port(f"tcp://{host}")
        self.inbox = TokenInbox(ReplyTo(f"tcp://{host}:{port}", public_key.decode()))
        self._reader = SocketReader(socket, self._take, MAX_AT_ONCE)

    def close(self) -> None:
        """Receive nothing more."""
        self._reader.close()
        self._context.destroy(linger=0)

    def _take(self, messages: Sequence[bytes]) -> None:
        steps = []
        for data in messages:
            try:
                steps.append(outputs_of_wire(data))
            except msgspec.MsgspecError:
                logger.exception("a message of %d bytes is not from a replica", len(data))
        self.inbox.deliver(*steps)
