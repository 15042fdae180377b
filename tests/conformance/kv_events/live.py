"""A live engine's stream: what it publishes for a while, and what it sends again, which must be the same."""

from __future__ import annotations

import time

import zmq

from serve_app.engine.vllm.events.batches import END_OF_REPLAY, SEQUENCE_BYTES
from tests.conformance.kv_events.laws import Checker

_ANSWER_S = 10.0


class NoAnswer(RuntimeError):
    """The engine's replay socket did not answer to the end."""


def listen(endpoint: str, replay: str | None, seconds: float) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Return by number the batches that were published within ``seconds``, and those the engine sent again after.

    Raises NoAnswer, ``zmq.ZMQError`` for an address that is none.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        live = context.socket(zmq.SUB)
        live.setsockopt(zmq.RCVHWM, 0)
        live.subscribe(b"")
        live.connect(endpoint)
        published: dict[int, bytes] = {}
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if live.poll(1000 * left_s):
                *_, number, payload = live.recv_multipart()
                published[int.from_bytes(number, "big")] = payload
        return published, {} if replay is None else _replay(context, replay)
    finally:
        context.destroy(linger=0)


def check_live(checker: Checker, published: dict[int, bytes], again: dict[int, bytes]) -> list[tuple[int, bytes]]:
    """Let a checker read all that came, by number, and return it; what was lost on the way is there from the replay."""
    for number in sorted(published.keys() & again.keys()):
        checker.replayed(number, published[number] == again[number])
    batches = sorted((again | published).items())
    for number, payload in batches:
        checker.batch(number, payload)
    return batches


def _replay(context: zmq.Context[zmq.Socket[bytes]], address: str) -> dict[int, bytes]:
    asked = context.socket(zmq.DEALER)
    asked.setsockopt(zmq.RCVHWM, 0)
    asked.connect(address)
    asked.send_multipart((b"", bytes(SEQUENCE_BYTES)))
    again: dict[int, bytes] = {}
    while asked.poll(1000 * _ANSWER_S):
        *_, raw, payload = asked.recv_multipart()
        number = int.from_bytes(raw, "big", signed=True)
        if number == END_OF_REPLAY:
            return again
        again[number] = payload
    raise NoAnswer(f"{address} sent {len(again)} batches and no end")
