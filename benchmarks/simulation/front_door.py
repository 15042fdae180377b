"""Who decides: a RoutingCore, alone or narrowed down by Ray's prefix tree.

Owns the making of the real router's settings for a contender, and the way of a request that is sent back. Knows nothing
of replicas' insides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from benchmarks.common.virtual_clock import VirtualClock
from benchmarks.simulation.ray_prefix import RayPrefixTree
from benchmarks.simulation.settings import ClusterSettings, Contender, SimulatedRequest
from router.core import RoutingCore
from router.protocol.events import Event, LoadReport
from router.protocol.request import Decision, RoutedRequest
from router.settings import PolicySettings, RouterSettings

RAY_PREFIX = "ray_prefix"

Submit = Callable[[SimulatedRequest, Decision], LoadReport | None]
"""Gives a request to the chosen replica; returns the load because of which that one sends it back."""


class FrontDoor:
    """One router. ``tree``: given for Ray's prefix rule, and shared by all routers."""

    def __init__(
        self,
        name: str,
        replica_ids: list[str],
        settings: ClusterSettings,
        contender: Contender,
        clock: VirtualClock,
        tree: RayPrefixTree | None = None,
    ) -> None:
        scoring = PolicySettings(shortest_first=contender.shortest_first, max_holders=settings.max_holders)
        policy = "least_loaded" if tree is not None else contender.policy
        core_settings = RouterSettings(policy, settings.block_size, scoring=scoring)
        self.core = RoutingCore(name, core_settings, clock=clock, rng=Random(f"{settings.seed} {name}"))
        self.core.update_replicas(replica_ids)
        self._replica_ids = replica_ids
        self._block_size = settings.block_size
        self._resend_s = settings.resend_s
        self._clock = clock
        self._tree = tree
        self._rng = Random(f"{settings.seed} {name} ties")

    def take(self, replica_id: str, events: tuple[Event, ...]) -> None:
        """Take one feed message."""
        self.core.apply(replica_id, events)

    def send(self, request: SimulatedRequest, submit: Submit, rerouted: int = 0) -> None:
        """Send a request to a replica that takes it. ``rerouted``: how often one has sent it back."""
        decision = self._decide(request, rerouted)
        load = submit(request, decision)
        if load is not None:
            self._clock.after(self._resend_s, partial(self._send_again, request, submit, decision, load, rerouted + 1))

    def _send_again(
        self, request: SimulatedRequest, submit: Submit, decision: Decision, load: LoadReport, rerouted: int
    ) -> None:
        self.core.rerouted(decision, load)
        self.send(request, submit, rerouted)

    def _decide(self, request: SimulatedRequest, rerouted: int) -> Decision:
        tokens = request.trace.prompt_tokens
        routed = RoutedRequest(
            str(request.number), request.block_hashes, tokens, request.placement_key, rerouted=rerouted
        )
        blocked = self._refused_by_tree(request) if self._tree is not None else ()
        decision = self.core.decide(routed, blocked)
        assert decision is not None, "simulated replicas are never full"
        if self._tree is not None:
            self._tree.insert(decision.replica_id, request.prefixes(), self._block_size)
        return decision

    def _refused_by_tree(self, request: SimulatedRequest) -> list[str]:
        """Return all replicas but the one with the shortest queue among those that the tree proposes."""
        assert self._tree is not None
        loads = self.core.loads
        proposed = sorted(self._tree.candidates(request.prefixes(), request.trace.prompt_tokens, self._block_size))
        self._rng.shuffle(proposed)
        requests = (loads.running + loads.waiting).tolist()
        chosen = min(proposed, key=lambda name: requests[loads.row_of(name) or 0])
        return [name for name in self._replica_ids if name != chosen]
