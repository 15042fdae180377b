"""Outputs between the step that made them and their delivery, one batch per submitter."""

import logging
from collections.abc import Callable

from serve_app.engine.protocol import EngineOutput, OutputSink

_log = logging.getLogger(__name__)


class Outbox:
    """Outputs waiting to be delivered. ``on_first``: called when an output enters an empty box."""

    def __init__(self, on_first: Callable[[], object] = lambda: None) -> None:
        self._on_first = on_first
        self._batches: dict[OutputSink, list[EngineOutput]] = {}

    def add(self, sink: OutputSink, output: EngineOutput) -> None:
        """Add an output."""
        if not self._batches:
            self._on_first()
        self._batches.setdefault(sink, []).append(output)

    def deliver(self) -> None:
        """Empty the box: each sink gets its batch. A failing sink does not affect others."""
        batches, self._batches = self._batches, {}
        for sink, batch in batches.items():
            try:
                sink(batch)
            except Exception:
                _log.exception("an output sink failed for %s", ", ".join(output.request_id for output in batch))
