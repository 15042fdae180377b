"""Server-sent events: the framing and the headers. What the JSON says, and how a stream ends, is each API's own."""

CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Neither caches nor a buffering proxy may hold tokens back."""


def named_event(name: str, payload: bytes) -> bytes:
    """Frame JSON on one line under a name, for the APIs whose events have one."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), payload)


def data_event(payload: bytes) -> bytes:
    """Frame JSON on one line; JSON from an encoder holds no line break."""
    return b"data: " + payload + b"\n\n"
