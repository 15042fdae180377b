"""Started for the time of a measurement, and stopped whatever happens: engines and feeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from router.feed import FeedPublisherThread
from serve_app.engine.protocol import Engine

Started = TypeVar("Started", bound=Engine | FeedPublisherThread)


@contextmanager
def running(thread: Started) -> Iterator[Started]:
    """Start what runs in threads or processes of its own, and stop it in the end."""
    thread.start()
    try:
        yield thread
    finally:
        thread.stop()
