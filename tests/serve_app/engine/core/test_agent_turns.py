"""Recorded loops of agents' clients over two engines behind one router: the caches deliver what turns share."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, zip_longest
from pathlib import Path

import pytest
from msgspec import structs

from router.core import RoutingCore
from router.protocol.events import Event
from router.settings import RouterSettings
from serve_app.tenants import Tenant
from tests.clients.turns import BLOCK, CLIENTS, Loop, RecordedRequest, preparer_of, recorded
from tests.serve_app.engine.simulated import GatedRunner, MakeSimulated
from tests.serve_app.engine.tiny import Collector
from tests.serve_app.tool_templates.families import family


@pytest.fixture(scope="module")
def model(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family("hermes", demo_model_path, tmp_path_factory.mktemp("turns") / "hermes")


def in_turns() -> Iterator[tuple[str, RecordedRequest]]:
    """Yield all clients' requests as if they worked at the same time."""
    for row in zip_longest(*map(recorded, CLIENTS)):
        yield from ((client, request) for client, request in zip(CLIENTS, row, strict=True) if request is not None)


def test_each_turn_gets_what_its_client_sent_before(model: Path, make_simulated: MakeSimulated) -> None:
    """Five clients in turns, in pools that hold them all, routed by what the engines' events say."""
    preparer, loops, names = preparer_of(model), {client: Loop() for client in CLIENTS}, count()
    core = RoutingCore("router", RouterSettings(block_size=BLOCK))
    told: dict[str, list[Event]] = {"a": [], "b": []}
    sizes = {"num_blocks": 16_384, "max_num_batched_tokens": 8192, "max_model_len": 65_536, "block_size": BLOCK}
    engines = {name: make_simulated(GatedRunner(), sink=events.extend, **sizes) for name, events in told.items()}
    core.update_replicas(list(engines))
    for client, request in in_turns():
        (made,) = asyncio.run(preparer.prepare(request.parsed(), Tenant("t"), f"r{next(names)}"))
        made = structs.replace(made, sampling=replace(made.sampling, max_tokens=2))
        decision, collector = core.decide(made), Collector()
        assert decision is not None
        engines[decision.replica_id].submit(structs.replace(made, decision=decision), collector)
        collector.wait([made.request_id])
        core.release(decision)
        for name, events in told.items():
            core.apply(name, events[:])
            events.clear()
        loops[client].add(made.token_ids, collector.cached[made.request_id])
    for client, loop in loops.items():
        assert loop.share() >= 0.99, (client, loop.short())
