"""An engine that is no process of ours: its KV events as long as they can be followed and believed, else why not."""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from router.protocol.events import CacheCleared, Event
from router.vllm_events.pool import FollowedPool
from router.vllm_events.subscriber import EventSubscriber

JUDGED, WRONG = 16, 4
"""Events are disbelieved after so many wrong predictions among the last ones, and believed after as many right ones."""

SILENT_S = 5.0
"""How long after computed blocks their events may come."""

MOST_BLOCKS = 1 << 21
"""Most blocks followed of an engine, whatever size of its pool it tells: more than any machine's memory holds."""


class FarEngine:
    """One engine's blocks (``pool``), forwarded to ``sink`` as router events while they are believed.

    A prediction is wrong if a request reused fewer tokens than the events promised: more is no lie, since an engine may
    have been filled before it was followed. An eviction between a request and its start looks the same, and is rare.
    ``blind``: a reason from elsewhere why its events are of no use.
    """

    def __init__(self, block_size: int, max_blocks: int, sink: Callable[[Sequence[Event]], None]) -> None:
        self.pool = FollowedPool(block_size, min(max_blocks or MOST_BLOCKS, MOST_BLOCKS), far=True)
        self.right = self.wrong = 0
        self.blind = ""
        self.follower: EventSubscriber | None = None
        self._sink = sink
        self._silent = False
        self._passing = threading.Lock()
        self._last = deque[bool](maxlen=JUDGED)
        self._lies = ""
        self._unheard_s: float | None = None
        self._batches = self._connections = 0

    def follow(self, publish: str, replay: str) -> None:
        """Begin to listen. ``publish``, ``replay``: as in ``EventSubscriber``; ``replay`` "": nothing is sent again."""
        self.follower = EventSubscriber(publish, replay, self.pool, self.hear, far=True)
        self.follower.start()

    def stop(self) -> None:
        """Stop listening; the sink gets nothing more from the engine. It may take some seconds."""
        self._silent = True
        if self.follower is not None:
            self.follower.stop()

    def forget(self) -> None:
        """Let the sink forget the engine's blocks and get nothing more from it; ``stop`` is still due."""
        self._silent = True
        self._clear()

    def hear(self, events: Sequence[Event]) -> None:
        """Take the pool's events, in the listening thread."""
        with self._passing:
            if not (self._lies or self._silent):
                self._sink(events)

    def _clear(self) -> None:
        with self._passing:  # nothing that is on its way comes after it
            self._sink((CacheCleared(),))

    def computed(self, now_s: float) -> None:
        """Note that the engine has just filled a block, and will report it."""
        if self._unheard_s is None:
            self._unheard_s, self._batches = now_s, 0 if self.follower is None else self.follower.batches

    def judge(self, predicted_tokens: int, cached_tokens: int) -> None:
        """Compare a request's reused tokens with its prediction."""
        if not predicted_tokens:
            return
        self._renew()
        fits = cached_tokens >= predicted_tokens
        self.right, self.wrong = self.right + fits, self.wrong + (not fits)
        self._last.append(fits)
        wrong = self._last.count(False)
        if not self._lies and wrong >= WRONG:
            self._lies = f"of its last {len(self._last)} predictions {wrong} were wrong: fewer tokens were cached"
            self._clear()
        elif self._lies and not wrong and len(self._last) == JUDGED:
            self._lies = ""
            if self.follower is not None:
                self.follower.tell(anew=True)

    def doubt(self, now_s: float) -> str:
        """Return why requests should go to this engine by load, "" if by its KV events."""
        follower = self.follower
        if self.blind or follower is None:
            return self.blind or "no KV events are followed"
        self._renew()
        if follower.unsupported:
            return follower.unsupported
        if follower.failed:
            return f"its KV events could not be followed ({follower.failed}); that begins anew"
        if not (follower.connected or follower.resent):
            return "its feed of KV events is cut" if follower.connections else "no KV events can be heard from it"
        if follower.batches != self._batches:
            self._unheard_s = None
        if self._unheard_s is not None and now_s - self._unheard_s > SILENT_S:
            return "it publishes no KV events (start it with --kv-events-config)"
        return self._lies

    def _renew(self) -> None:
        """Judge the engine anew once its feed has come back: it may be another process, and no one saw the other go."""
        follower = self.follower
        if follower is None or follower.connections == self._connections:
            return
        self._connections = follower.connections
        self._last.clear()
        if self._lies:
            self._lies = ""
            follower.tell(anew=True)
