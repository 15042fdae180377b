"""Server-sent events: the framing and the headers. Each API defines the JSON and the end of the stream."""

CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Keep caches and buffering proxies from delaying tokens."""
END = b"\n\n"
"""The end of an event; an encoder's JSON holds no line break."""


def named_event(name: str, payload: bytes) -> bytes:
    """Frame one line of JSON under an event name, for the APIs that name their events."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), payload)


def data_event(payload: bytes) -> bytes:
    """Frame one line of JSON."""
    return b"data: " + payload + b"\n\n"
