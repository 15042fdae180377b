"""A router that knows four replicas: each holds five blocks more of one prompt than the last, and has more to do."""

from __future__ import annotations

from random import Random

from router.core import RoutingCore
from router.protocol.events import BlocksStored, LoadReport
from router.protocol.request import RoutedRequest
from router.settings import RouterSettings

CHAIN = Random(0).randbytes(16 * 20)


def core_with(policy: str) -> RoutingCore:
    core = RoutingCore("me", RouterSettings(policy), clock=lambda: 0.0, rng=Random(1))
    core.update_replicas("abcd")
    for number, name in enumerate("abcd"):
        core.apply(name, [BlocksStored(CHAIN[: 80 * number]), LoadReport(100 * number, 1, 1, 8, 16, 1000.0)])
    return core


def request(number: int) -> RoutedRequest:
    """Return a request for that prompt; ``number`` decides where it would be placed without a cache."""
    return RoutedRequest(f"q{number}", CHAIN, 325, Random(number).randbytes(16))
