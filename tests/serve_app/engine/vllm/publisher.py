"""An engine's end of the sockets, as vLLM's ``ZmqEventPublisher``: publishes, keeps the last batches, replays them."""

from __future__ import annotations

import queue
import threading
from collections import deque

import zmq

from serve_app.engine.vllm.events.batches import END_OF_REPLAY, SEQUENCE_BYTES


def number_frame(number: int) -> bytes:
    """Return a batch's number as it travels."""
    return number.to_bytes(SEQUENCE_BYTES, "big", signed=True)


class Publisher:
    """Publishes payloads under numbers from 0 on; ``lose``: kept for a replay, but not published."""

    def __init__(self, publish: str, replay: str, kept: int = 10_000) -> None:
        self._queue: queue.Queue[tuple[bytes, bool] | None] = queue.Queue()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._addresses = publish, replay
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, payload: bytes, *, lose: bool = False) -> None:
        self._queue.put((payload, lose))

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        live, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        live.bind(self._addresses[0])
        replay.bind(self._addresses[1])
        number = 0
        while True:
            if replay.poll(0):
                client, empty, first = replay.recv_multipart()
                for kept, payload in self._kept:
                    if kept >= int.from_bytes(first, "big"):
                        replay.send_multipart((client, empty, number_frame(kept), payload))
                replay.send_multipart((client, empty, number_frame(END_OF_REPLAY), b""))
            try:
                item = self._queue.get(timeout=0.02)
            except queue.Empty:
                continue
            if item is None:
                break
            payload, lose = item
            if not lose:
                live.send_multipart((b"topic", number_frame(number), payload))
            self._kept.append((number, payload))
            number += 1
        context.destroy(linger=0)
