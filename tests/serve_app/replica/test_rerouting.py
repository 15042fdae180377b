"""A replica called on outdated information returns the request with its load, before any other action."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from router.protocol.events import LoadReport
from router.protocol.request import Decision
from serve_app.engine.protocol import EngineOutput, output_of_wire
from serve_app.replica.replica import Replica
from tests.serve_app.engine.tiny import request

LOAD = LoadReport(5000, 0, 1, 8, 16, 1000.0, taken_at_s=3.0)
REQUEST = request("q", [0], 1)


class Begun(Exception):
    """The replica took the request."""


def asked(decision: Decision | None) -> EngineOutput:
    """Ask a replica with ``LOAD`` and return its first chunk. Raises Begun if it takes the request."""

    def begin(*_: Any) -> None:
        raise Begun

    replica: Any = SimpleNamespace(
        _replica_id="me",
        _tracer=None,
        _running=SimpleNamespace(closed=False, begin=begin),
        _engine=SimpleNamespace(load=lambda: LOAD, adapters=SimpleNamespace(loaded=())),
        _adapters=SimpleNamespace(load_s=0.5),
        _puller=SimpleNamespace(tokens_per_s=7.0),
        _attributes={"zone": "a"},
    )

    replica._load = partial(Replica._load, replica)
    return output_of_wire(asyncio.run(Replica.generate(replica, structs.replace(REQUEST, decision=decision))))


def test_old_news_is_answered_with_the_load() -> None:
    """The load is complete, as in the feed, and arrives in a chunk's wire format."""
    chunk = asked(Decision("me", "router", 1, 0, 0, "cold", queued_tokens=0))
    assert (chunk.error, chunk.request_id) == ("rerouted", "q")
    assert chunk.load == structs.replace(LOAD, pull_tokens_per_s=7.0, adapter_load_s=0.5, attributes={"zone": "a"})


@pytest.mark.parametrize("queued", [5000, 9000, None])
def test_a_request_with_current_information_is_taken(queued: int | None) -> None:
    """The work is as much as believed, less, or not checked at all."""
    with pytest.raises(Begun):
        asked(Decision("me", "router", 1, 0, 0, "cold", queued_tokens=queued))
    with pytest.raises(Begun):
        asked(None)
