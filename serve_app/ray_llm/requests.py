"""What the plug-in remembers of requests: a router's open decisions, a replica's prefills and its latest answers.

Decisions stay until their replica reports the first token, by prompt: equal prompts have equal keys.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from hashlib import sha256
from threading import Lock

from msgspec import structs

from router.protocol.events import LoadReport
from router.protocol.request import Decision
from router.protocol.samples import Rate
from serve_app.engine.reports import LoadReports, PrefillRate

DecisionKey = tuple[str, bytes]
"""A replica's id, and the ``request_key`` of a prompt."""


class OpenDecisions:
    """At most ``most`` decisions, each for at most ``ttl_s``: some never begin, as vLLM may refuse their requests."""

    def __init__(self, most: int, ttl_s: float) -> None:
        self._most = most
        self._ttl_s = ttl_s
        self._by_age: OrderedDict[int, tuple[float, DecisionKey]] = OrderedDict()
        self._by_key: dict[DecisionKey, dict[int, Decision]] = {}

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, key: DecisionKey, decision: Decision, now_s: float) -> list[Decision]:
        """Add a decision, and return those that are dropped for it, the oldest first."""
        self._by_age[decision.reservation] = now_s, key
        self._by_key.setdefault(key, {})[decision.reservation] = decision
        dropped = []
        while len(self._by_age) > self._most or now_s - self._oldest_s() >= self._ttl_s:
            number, (_, old) = self._by_age.popitem(last=False)
            decisions = self._by_key[old]
            dropped.append(decisions.pop(number))
            if not decisions:
                del self._by_key[old]
        return dropped

    def _oldest_s(self) -> float:
        return next(iter(self._by_age.values()))[0]

    def of(self, key: DecisionKey) -> Collection[Decision]:
        """Return a prompt's decisions."""
        return self._by_key.get(key, {}).values()

    def take(self, key: DecisionKey) -> Collection[Decision]:
        """Remove and return a prompt's decisions."""
        decisions = self._by_key.pop(key, {})
        for number in decisions:
            del self._by_age[number]
        return decisions.values()


_MEMORY_TOKENS = 65_536
"""The rate is measured over roughly this many of the latest computed prompt tokens."""


class Prefills:
    """Requests between their arrival and their first token. Any thread; seconds by ``clock``."""

    def __init__(self, max_running: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_running = max_running
        self._clock = clock
        self._lock = Lock()
        self._waiting: dict[str, tuple[int, bytes]] = {}
        self._running: set[str] = set()
        self._arrived: list[bytes] = []
        self._begun: list[bytes] = []
        self._busy_since_s = 0.0
        self._rate = Rate()
        self._reports = LoadReports(max_running, 1 << 20, lambda: PrefillRate.of(self._rate))

    def arrived(self, request_id: str, uncached_tokens: int, key: bytes) -> None:
        """Note a request with this many prompt tokens to compute. ``key``: see ``request_key``."""
        with self._lock:
            self._arrived.append(key)
            if not self._waiting:
                self._busy_since_s = self._clock()
            self._waiting[request_id] = uncached_tokens, key

    def begun(self, request_id: str) -> None:
        """Note a request's first token."""
        with self._lock:
            now_s, waited = self._clock(), self._waiting.pop(request_id, None)
            if waited is None:
                return
            tokens, key = waited
            self._begun.append(key)
            self._running.add(request_id)
            self._rate = self._rate.then(tokens, now_s - self._busy_since_s)
            self._busy_since_s = now_s
            if self._rate.amount > _MEMORY_TOKENS:
                self._rate = self._rate.then(0, 0, kept=0.5)

    def ended(self, request_id: str) -> None:
        """Note that a request has ended, with or without a token."""
        with self._lock:
            waited = self._waiting.pop(request_id, None)
            if waited is not None:
                self._begun.append(waited[1])
            self._running.discard(request_id)

    def report(self) -> LoadReport:
        """Return the load as one message, the only one that names the news before it. vLLM's queue is unbounded."""
        with self._lock:
            arrived, begun = b"".join(self._arrived), b"".join(self._begun)
            self._arrived, self._begun = [], []
            waiting = max(0, len(self._waiting) + len(self._running) - self._max_running)
            queued = sum(tokens for tokens, _ in self._waiting.values())
            report = self._reports.report(
                self._clock(), queued_tokens=queued, running=len(self._running), waiting=waiting
            )
        return structs.replace(report, arrived=arrived, begun=begun)


RecentAnswer = tuple[str, str, bytes, int, int, float]
"""Request id, tenant, the hashes of the prompt's whole blocks, prompt tokens, cached tokens, TTFT in seconds."""

KEPT = 256


class RecentAnswers:
    """The last ``KEPT`` requests that had their first token, numbered from 1. Used from one event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._kept: deque[RecentAnswer] = deque(maxlen=KEPT)

    def add(self, answer: RecentAnswer) -> None:
        """Keep an answer. The id of a response, which may open its text, is replaced by a digest."""
        if answer[0].startswith("resp_"):
            answer = (sha256(answer[0].encode()).hexdigest()[:32], *answer[1:])
        self.number += 1
        self._kept.append(answer)

    def since(self, number: int) -> list[RecentAnswer]:
        """Return the kept answers after the one with this number, the oldest first."""
        new = min(self.number - number, len(self._kept))
        return list(self._kept)[len(self._kept) - new :] if new > 0 else []
