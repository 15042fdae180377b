"""Puts an engine's event batches in order: what was lost is asked for again, and what is lost for good is said.

Live batches come numbered from 0, some may be missing. The engine keeps its last batches and sends them again from a
number on, with an end mark. A loss at the end shows in no later number, so after a silence the engine is asked too.
Knows no socket: bytes and times in, ordered batches out. One engine's life; a new engine needs a new one.
"""

from __future__ import annotations

from dataclasses import dataclass

SILENCE_S = 1.0
"""After so long without a batch the engine is asked whether there was one."""

REPLAY_TIMEOUT_S = 5.0
"""An engine that has not answered by then is asked again."""

MAX_AHEAD = 1000
"""Batches kept that came while one before them is missing; more are dropped, and asked for later."""


@dataclass(frozen=True, slots=True)
class Lost:
    """So many batches are gone for good."""

    batches: int


Ordered = bytes | Lost


class BatchOrder:
    """Where one stream of batches stands. Every method takes the time in seconds by one clock."""

    def __init__(self, now_s: float) -> None:
        self.expected = 0
        self.replayed_batches = 0
        self._ahead: dict[int, bytes] = {}
        self._heard_s = now_s
        self._asked_s: float | None = None
        self._answered_before = 0

    def live(self, number: int, payload: bytes, now_s: float) -> list[Ordered]:
        """Take a batch that the engine published; return what can be taken now, in order."""
        self._heard_s = now_s
        return self._take(number, payload)

    def replayed(self, number: int, payload: bytes) -> list[Ordered]:
        """Take a batch that the engine sent again, as ``live`` does."""
        self.replayed_batches += number == self.expected
        return self._take(number, payload)

    def replay_ended(self, now_s: float) -> list[Ordered]:
        """Take the end mark: what was missing before the batches known when the engine was asked will not come."""
        self._asked_s, self._heard_s = None, now_s
        out: list[Ordered] = []
        while self.expected < self._answered_before:
            gap_end = min(self._ahead)  # there is one: the batch whose number was known when the engine was asked
            out += [Lost(gap_end - self.expected)]
            self.expected = gap_end
            out += self._in_order()
        return out

    def ask(self, now_s: float) -> int | None:
        """Return from which number on to ask for a replay, if it is time to; answers to earlier questions are void."""
        if self._asked_s is not None:
            due = now_s - self._asked_s >= REPLAY_TIMEOUT_S
        else:
            due = bool(self._ahead) or now_s - self._heard_s >= SILENCE_S
        if not due:
            return None
        self._asked_s, self._answered_before = now_s, max(self._ahead, default=0)
        return self.expected

    def _take(self, number: int, payload: bytes) -> list[Ordered]:
        if number > self.expected:
            if len(self._ahead) < MAX_AHEAD:
                self._ahead[number] = payload
            return []
        if number < self.expected:
            return []
        self._ahead[number] = payload
        return self._in_order()

    def _in_order(self) -> list[Ordered]:
        out: list[Ordered] = []
        while (payload := self._ahead.pop(self.expected, None)) is not None:
            out.append(payload)
            self.expected += 1
        return out
