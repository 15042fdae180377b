"""What a simulated cluster is like and who competes on it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.common.trace import TRACE_BLOCK_TOKENS, TraceRequest, token_ids_of
from router.protocol.block_hash import PrefixScope, hash_blocks, split_chain
from serve_app.config.app import RoutingSection

SCOPE = PrefixScope("simulated")
_ROOT = SCOPE.root(b"simulation")


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The cost model and its sizes.

    A replica computes one prompt at a time, at ``prefill_tokens_per_s``, slowed by ``decode_weight`` for each
    sequence that decodes when it starts; an output token takes ``decode_token_s``. Replicas tell cache events at once,
    their load as soon as prefills start and end, as the product does, and while one runs every ``report_interval_s``;
    both reach routers ``feed_delay_s`` later. A request that a replica sends back (see ``router.policy.recheck``)
    reaches the next one ``resend_s`` later.
    ``max_holders``: the default policy's bound on the replicas that hold one prefix.
    """

    replicas: int = 16
    blocks: int = 1500
    block_size: int = TRACE_BLOCK_TOKENS
    prefill_tokens_per_s: float = 5000.0
    decode_weight: float = 0.01
    decode_token_s: float = 0.02
    pull_tokens_per_s: float = 60_000.0
    max_holders: int = 16
    routers: int = 1
    feed_delay_s: float = 0.0
    report_interval_s: float = RoutingSection().load_report_interval_s
    resend_s: float = 0.01
    speed: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.replicas, self.blocks, self.block_size, self.routers) < 1:
            raise ValueError("replicas, blocks, block size and routers must be at least 1")
        if min(self.prefill_tokens_per_s, self.pull_tokens_per_s, self.speed, self.report_interval_s) <= 0.0:
            raise ValueError("rates, speed and the report interval must be above 0")
        if min(self.feed_delay_s, self.resend_s, self.decode_weight, self.decode_token_s) < 0.0:
            raise ValueError("delays and costs must not be negative")


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy on replicas of one kind.

    ``shortest_first``: replicas run the least uncached work first, aged; else first come, first served.
    ``pull``: the chosen replica copies a prefix that another one holds where that is faster than computing it.
    """

    policy: str
    shortest_first: bool = False
    pull: bool = False


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request of a trace.

    ``block_hashes``: of its full blocks, packed; ``placement_key`` names its conversation's opening.
    """

    number: int
    trace: TraceRequest
    block_hashes: bytes
    placement_key: bytes

    def prefixes(self) -> list[bytes]:
        """Return the hashes of the prompt's full blocks, each of which stands for all up to it."""
        return list(split_chain(self.block_hashes))


def prepare(trace: list[TraceRequest], block_size: int = TRACE_BLOCK_TOKENS) -> list[SimulatedRequest]:
    """Hash a trace's prompts once for all contenders, with the hash that routers and replicas use.

    The first block of the published trace is common to all prompts (a chat template), so that the first two
    together stand for the system prompt's key.
    """
    prepared = []
    for number, request in enumerate(trace):
        chain = hash_blocks(_ROOT, token_ids_of(request.hash_ids, request.prompt_tokens, block_size), block_size)
        key = hash_blocks(_ROOT, token_ids_of(request.hash_ids[:2], 2, 1), 2) or chain[:16] or _ROOT
        prepared.append(SimulatedRequest(number, request, chain, key))
    return prepared
