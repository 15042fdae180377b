"""The settings of a simulated cluster, and its contenders."""

from dataclasses import dataclass

from benchmarks.common.trace import token_ids_of
from router.protocol.block_hash import PrefixScope, hash_blocks, split_chain
from router.settings import DEFAULTS
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest
from serve_app.config.app import RoutingSection
from serve_app.config.cache import CacheSection

SCOPE = PrefixScope("simulated")
_ROOT = SCOPE.root(b"simulation")


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The cost model and its sizes.

    A replica computes one prompt at a time, at ``prefill_tokens_per_s`` (or ``prefill_rates``, which replicas have in
    turn), slowed by ``decode_weight`` for each sequence that decodes at its start; an output token takes
    ``decode_token_s``. Cache events and loads reach routers after ``feed_delay_s``; during a prefill, loads are
    reported every ``report_interval_s``. A request that a replica sends back (``router.policies``) reaches the next one
    after ``resend_s``. Sessions wait up to ``session_wait_s`` for capacity.
    """

    replicas: int = 16
    blocks: int = 1500
    block_size: int = TRACE_BLOCK_TOKENS
    prefill_tokens_per_s: float = 5000.0
    prefill_rates: tuple[float, ...] = ()
    decode_weight: float = 0.01
    decode_token_s: float = 0.02
    pull_tokens_per_s: float = 60_000.0
    max_holders: int = DEFAULTS.scoring.max_holders
    routers: int = 1
    feed_delay_s: float = 0.0
    report_interval_s: float = RoutingSection().load_report_interval_s
    resend_s: float = 0.01
    session_wait_s: float = CacheSection().session_wait_s
    speed: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy with replicas of one kind.

    ``shortest_first``: least uncached work first, with aging; else first come, first served. ``pull``: the chosen
    replica copies a prefix from another one if that is faster. ``admission``: sessions wait for capacity. ``closes``:
    with agents, clients name their sessions and close them. ``oracle``: with agents, replicas know when each session
    will return, and evict first what returns last. No real system can know this.
    """

    policy: str
    shortest_first: bool = False
    pull: bool = False
    admission: bool = False
    closes: bool = False
    oracle: bool = False


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A trace's request. ``block_hashes``: its full blocks' hashes, packed; ``placement_key``: its opening's hash.

    ``session``: its client's name for its session, "" for none.
    """

    number: int
    trace: TraceRequest
    block_hashes: bytes
    placement_key: bytes
    session: str = ""

    def prefixes(self) -> list[bytes]:
        """Return the hashes of the prompt's full blocks."""
        return list(split_chain(self.block_hashes))


def prepare(trace: list[TraceRequest], block_size: int = TRACE_BLOCK_TOKENS) -> list[SimulatedRequest]:
    """Hash a trace's prompts once for all contenders."""
    prepared = []
    for number, request in enumerate(trace):
        chain = hash_blocks(_ROOT, token_ids_of(request.hash_ids, request.prompt_tokens, block_size), block_size)
        # All prompts of the published trace share the first block (a chat template): the key covers two blocks.
        key = hash_blocks(_ROOT, token_ids_of(request.hash_ids[:2], 2, 1), 2) or chain[:16] or _ROOT
        prepared.append(SimulatedRequest(number, request, chain, key))
    return prepared
