"""Server-sent events as OpenAI frames them: ``data:`` lines, ``[DONE]`` at the end, errors as one more event.

Owns the framing and the headers. Knows nothing of what the JSON says.
"""

from __future__ import annotations

import msgspec

from serve_app.api.openai.response import error_body
from serve_app.errors import WarmpathError

CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Neither caches nor a buffering proxy may hold tokens back."""

DONE = b"data: [DONE]\n\n"


def data_event(payload: bytes) -> bytes:
    """Frame JSON on one line; JSON from an encoder holds no line break."""
    return b"data: " + payload + b"\n\n"


def error_event(error: WarmpathError) -> bytes:
    """Frame an error that happens after the headers were sent; the stream ends after it, without ``[DONE]``."""
    return data_event(msgspec.json.encode(error_body(error)))
