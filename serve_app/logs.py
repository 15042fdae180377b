"""The log file of a Serve process: each line is in it at once, and warnings of every logger have their level there.

Serve's throughput mode keeps up to 1,000 lines in memory, which a crash loses, and which saves 1 of 20 us a line. Only
its own logger has a handler: others' warnings would pass through stderr, as INFO.
"""

import logging
import logging.handlers

_SERVE = logging.getLogger("ray.serve")


def log_at_once() -> None:
    """Write this process's log lines, and warnings of all its loggers, to Serve's log file as they come."""
    _SERVE.addFilter(_unbuffered)
    root = logging.getLogger()
    if not any(isinstance(handler, _ToServe) for handler in root.handlers):
        root.addHandler(_ToServe(logging.WARNING))
    _unbuffered()


def _unbuffered(record: logging.LogRecord | None = None) -> bool:
    """Let Serve's handlers keep no line; a filter, because Serve makes new handlers for other logging settings."""
    for handler in _SERVE.handlers:
        if isinstance(handler, logging.handlers.MemoryHandler) and handler.capacity > 1:
            handler.capacity = 1
            handler.flush()
    return True


class _ToServe(logging.Handler):
    """Hands the records of other loggers to Serve's handlers, which the root logger has not."""

    def emit(self, record: logging.LogRecord) -> None:
        _unbuffered()
        if not record.name.startswith(_SERVE.name):
            for handler in _SERVE.handlers:
                if record.levelno >= handler.level:
                    handler.handle(record)
