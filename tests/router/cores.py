"""A router's core that knows some replicas, and its decisions."""

from collections.abc import Callable, Mapping
from random import Random

from router.core import RoutingCore
from router.protocol.events import BlocksStored, LoadReport
from router.protocol.request import Decision, RoutedRequest
from router.settings import RouterSettings
from tests.harness.virtual_time import Clock

CHAIN = Random(0).randbytes(16 * 20)


def load(queued: int = 0, running: int = 0, waiting: int = 0, rate: float = 1000.0, **more: object) -> LoadReport:
    """Return the report of a replica that runs at most 8 sequences and queues at most 16."""
    return LoadReport(queued, running, waiting, 8, 16, rate, **more)  # type: ignore[arg-type]


def core_of(
    reports: Mapping[str, LoadReport] | str,
    held: Mapping[str, bytes] | None = None,
    clock: Callable[[], float] | None = None,
    name: str = "me",
    **settings: object,
) -> RoutingCore:
    """``reports``: by replica, or the one-letter names of idle replicas. ``held``: hashes by replica."""
    core = RoutingCore(
        name, RouterSettings.from_json({"block_size": 16, **settings}), clock=clock or Clock(), rng=Random(0)
    )
    core.update_replicas(reports)
    for replica in reports:
        stored = [BlocksStored(held[replica])] if held and replica in held else []
        core.apply(replica, [*stored, load() if isinstance(reports, str) else reports[replica]])
    return core


def ask(
    number: int = 0, chain: bytes = CHAIN, tokens: int | None = None, key: bytes = b"k" * 16, **more: object
) -> RoutedRequest:
    """Return a request for a chain's blocks and five more tokens."""
    return RoutedRequest(f"q{number}", chain, len(chain) + 5 if tokens is None else tokens, key, **more)  # type: ignore[arg-type]


def decided(core: RoutingCore, request: RoutedRequest, blocked: tuple[str, ...] = ()) -> Decision:
    decision = core.decide(request, blocked)
    assert decision is not None
    return decision
