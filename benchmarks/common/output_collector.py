"""Collects an engine's outputs by request, for a waiting thread."""

import threading
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager

from serve_app.engine.protocol import Engine, EngineOutput, EngineRequest


class OutputCollector:
    """An output sink."""

    def __init__(self) -> None:
        self.cached_tokens: dict[str, int] = {}
        self.first_s: dict[str, float] = {}
        """The moments of first tokens, by ``time.perf_counter``."""
        self.tokens: dict[str, list[int]] = {}
        self._ended: set[str] = set()
        self._failed: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, outputs: Sequence[EngineOutput]) -> None:
        """Record one step's outputs (in the engine's thread)."""
        with self._changed:
            for output in outputs:
                name = output.request_id
                self.tokens.setdefault(name, []).extend(output.token_ids)
                if output.first is not None:
                    self.cached_tokens[name] = output.first.cached_tokens
                    self.first_s[name] = time.perf_counter()
                if output.error:
                    self._failed.append(f"{name}: {output.message}")
                if output.finish_reason is not None:
                    self._ended.add(name)
            self._changed.notify_all()

    def answer_all(self, engine: Engine, requests: Sequence[EngineRequest]) -> None:
        """Submit requests together and wait until all end. Raises RuntimeError if one failed."""
        for request in requests:
            engine.submit(request, self)
        self.wait({request.request_id for request in requests})

    def wait(self, requests: Set[str]) -> None:
        """Wait until these requests have ended. Raises RuntimeError if one failed."""
        with self._changed:
            self._changed.wait_for(lambda: requests <= self._ended)
            if self._failed:
                raise RuntimeError(f"a request failed: {self._failed[0]}")


@contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    """Start an engine, and stop it at the end of the block."""
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
