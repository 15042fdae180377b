"""Started for the time of a measurement, and stopped whatever happens: engines and feeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from router.feed import FeedPublisherThread
from serve_app.engine.core.engine import TorchEngine


@contextmanager
def running(thread: TorchEngine | FeedPublisherThread) -> Iterator[None]:
    """Start what runs in a thread of its own, and stop it in the end."""
    thread.start()
    try:
        yield
    finally:
        thread.stop()
