"""One engine's load, from the requests that enter it and their first tokens."""

import time
from collections.abc import Callable
from threading import Lock

from router.protocol.events import LoadReport

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
        self._tokens = self._seconds = 0.0

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
            self._tokens += tokens
            self._seconds += now_s - self._busy_since_s
            self._busy_since_s = now_s
            if self._tokens > _MEMORY_TOKENS:
                self._tokens, self._seconds = self._tokens / 2, self._seconds / 2

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
            return LoadReport(
                queued_prefill_tokens=sum(tokens for tokens, _ in self._waiting.values()),
                running_sequences=len(self._running),
                waiting_sequences=waiting,
                max_running_sequences=self._max_running,
                max_waiting_sequences=1 << 20,
                prefill_tokens_per_s=self._tokens / self._seconds if self._seconds else 0.0,
                prefill_rate_tokens=round(self._tokens),
                taken_at_s=self._clock(),
                arrived=arrived,
                begun=begun,
            )
