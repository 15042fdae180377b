"""A simulated router: a RoutingCore, alone or restricted by Ray's prefix tree."""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from random import Random

from benchmarks.common.virtual_clock import VirtualClock
from benchmarks.simulation.settings import ClusterSettings, Contender, SimulatedRequest
from router.core import RoutingCore
from router.protocol.events import LoadReport
from router.protocol.request import Decision, RoutedRequest
from router.settings import PolicySettings, RouterSettings

RAY_PREFIX = "ray_prefix"
MATCH_RATE_THRESHOLD = 0.1

Submit = Callable[[SimulatedRequest, Decision], LoadReport | None]
"""Submits a request to the chosen replica; returns a load report if the replica sends it back."""


class RayPrefixTree:
    """Ray's PrefixCacheAffinityRouter on block ids: one tree of sent prefixes for all routers, without eviction.

    Source: ray 2.60, ray/llm/_internal/serve/routing_policies/prefix_aware/{prefix_aware_router,prefix_tree}.py.
    """

    def __init__(self, replica_ids: Iterable[str]) -> None:
        self._tokens = dict.fromkeys(replica_ids, 0)
        self._holders: dict[bytes, set[str]] = {}

    def candidates(self, prefixes: Collection[bytes], prompt_tokens: int, block_size: int) -> Collection[str]:
        """Return the replicas with the deepest known prefix; below the match rate, those with the fewest tokens.

        ``prefixes``: a hash for each leading block.
        """
        matched: Collection[str] = ()
        depth = 0
        for prefix in prefixes:
            holders = self._holders.get(prefix)
            if not holders:
                break
            matched, depth = holders, depth + 1
        if min(depth * block_size, prompt_tokens) < MATCH_RATE_THRESHOLD * prompt_tokens or not matched:
            smallest = min(self._tokens.values())
            return [name for name, tokens in self._tokens.items() if tokens == smallest]
        return matched

    def insert(self, replica_id: str, prefixes: Iterable[bytes], block_size: int) -> None:
        """Record that a prompt was sent to a replica."""
        for prefix in prefixes:
            holders = self._holders.setdefault(prefix, set())
            if replica_id not in holders:
                holders.add(replica_id)
                self._tokens[replica_id] += block_size


class SimulatedRouter:
    """One router. ``tree``: the tree of Ray's prefix rule, shared by all routers."""

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

    def send(self, request: SimulatedRequest, submit: Submit, rerouted: int = 0) -> None:
        """Send a request to a replica. ``rerouted``: how often a replica has sent it back."""
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
        """Return all replicas except the tree's candidate with the shortest queue."""
        assert self._tree is not None
        loads = self.core.loads
        proposed = sorted(self._tree.candidates(request.prefixes(), request.trace.prompt_tokens, self._block_size))
        self._rng.shuffle(proposed)
        requests = (loads.running + loads.waiting).tolist()
        chosen = min(proposed, key=lambda name: requests[loads.row_of(name) or 0])
        return [name for name in self._replica_ids if name != chosen]
