"""How busy one engine is, from the requests that enter it and their first tokens."""

import time
from collections.abc import Callable
from threading import Lock

from router.protocol.events import LoadReport

_MEMORY_TOKENS = 65_536
"""The rate is measured over about as many of the last prompt tokens that were computed."""


class Prefills:
    """Requests between their arrival and their first token. Any thread; seconds by ``clock``."""

    def __init__(self, max_running: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_running = max_running
        self._clock = clock
        self._lock = Lock()
        self._waiting: dict[str, int] = {}
        self._running: set[str] = set()
        self._busy_since_s = 0.0
        self._tokens = self._seconds = 0.0

    def arrived(self, request_id: str, uncached_tokens: int) -> None:
        """Note a request whose prompt has so many tokens to compute."""
        with self._lock:
            if not self._waiting:
                self._busy_since_s = self._clock()
            self._waiting[request_id] = uncached_tokens

    def begun(self, request_id: str) -> None:
        """Note a request's first token."""
        with self._lock:
            now_s, tokens = self._clock(), self._waiting.pop(request_id, None)
            if tokens is None:
                return
            self._running.add(request_id)
            self._tokens += tokens
            self._seconds += now_s - self._busy_since_s
            self._busy_since_s = now_s
            if self._tokens > _MEMORY_TOKENS:
                self._tokens, self._seconds = self._tokens / 2, self._seconds / 2

    def ended(self, request_id: str) -> None:
        """Note that a request is over, whether or not it had a token."""
        with self._lock:
            self._waiting.pop(request_id, None)
            self._running.discard(request_id)

    def report(self) -> LoadReport:
        """Return the load as one message. vLLM's line has no bound."""
        with self._lock:
            waiting = max(0, len(self._waiting) + len(self._running) - self._max_running)
            return LoadReport(
                queued_prefill_tokens=sum(self._waiting.values()),
                running_sequences=len(self._running),
                waiting_sequences=waiting,
                max_running_sequences=self._max_running,
                max_waiting_sequences=1 << 20,
                prefill_tokens_per_s=self._tokens / self._seconds if self._seconds else 0.0,
                prefill_rate_tokens=round(self._tokens),
                taken_at_s=self._clock(),
            )
