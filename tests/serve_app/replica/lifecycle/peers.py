"""Replicas without Ray: simulated engines, and calls between them that can be made to fail."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from router.protocol.block_hash import PrefixScope, extend_chain, split_chain
from serve_app.cache.kv_chain import KvChain
from serve_app.cache.prefix.hot_prefixes import HashedTokens, HotPrefixKind
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from serve_app.replica.lifecycle.answers import PeerAnswers
from serve_app.replica.lifecycle.handover import MoveMeters
from serve_app.replica.peers import HolderLost, Peers, PulledPart, Question, WantedPart
from serve_app.replica.pull import PIECE_BYTES, PullMeters

SIZE = 4
SECRET = b"k"
PIECE_BLOCKS = 3
BLOCK_BYTES = PIECE_BYTES // PIECE_BLOCKS
SCOPE = PrefixScope("m", salt=b"s")

Prompts = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=10).map(
        lambda blocks: [token for token in blocks for _ in "size"]
    ),
    max_size=8,
)
"""Prompts of whole blocks, many with equal prefixes."""


def make_engine(num_blocks: int = 64, *, model: str = "m", pins: int = 0, **settings: object) -> TorchEngine:
    """Return an engine that is not started: work for its loop runs at once."""
    values = EngineSettings(
        block_size=SIZE,
        num_blocks=num_blocks,
        pin_budget_blocks=pins,
        model_fingerprint=model,
        **settings,  # type: ignore[arg-type]
    )
    runner = SimulatedRunner(CostModel(block_bytes=BLOCK_BYTES), values, sleep=lambda _: None)
    return TorchEngine(runner, values, lambda _: None)


def fill(engine: TorchEngine, ids: Sequence[int], *, scope: PrefixScope = SCOPE, tenant: str = "default") -> list[int]:
    """Cache a prompt as an ended request would; return its full blocks."""
    cache, array = engine.cache, np.array(ids, dtype=np.int32)
    root = scope.private.root(SECRET)
    if scope.public_blocks:
        root = scope.public.root(SECRET) + root
    chain = extend_chain(root, scope.public_blocks, array, SIZE)
    matched = cache.match(scope, array, chain)
    cache.acquire(matched)
    cache.hit(matched)
    full = len(ids) // SIZE
    blocks = matched + cache.allocate(full - len(matched), tenant)
    cache.publish(scope, array, chain, blocks, len(matched), full)
    cache.release(blocks)
    return blocks


def hashes(engine: TorchEngine) -> frozenset[bytes]:
    """Return the hashes of all blocks that an engine has cached."""
    return frozenset(one for run in engine.transfer.hot_prefixes().runs for one in split_chain(run.hashes))


def filled(*prompts: Sequence[int], blocks: int = 256, **settings: object) -> TorchEngine:
    """Return an engine that has cached prompts."""
    engine = make_engine(blocks, **settings)  # type: ignore[arg-type]
    for ids in prompts:
        fill(engine, ids)
    return engine


class Local(Peers):
    """The other replicas by name. ``dies_after``: calls that a replica answers before it is dead."""

    def __init__(self, engines: dict[str, TorchEngine], dies_after: dict[str, int] | None = None) -> None:
        self.engines = engines
        self.meters = {name: MoveMeters() for name in engines}
        self.answers = {
            name: PeerAnswers(engine, tuple, self.meters[name], PullMeters()) for name, engine in engines.items()
        }
        self.left = dict(dies_after or {})
        self.asked: list[tuple[str, WantedPart]] = []
        self.sent: list[tuple[str, bytes]] = []

    async def fetch(self, holder: str, wanted: WantedPart) -> PulledPart:
        self.asked.append((holder, wanted))
        return await super().fetch(holder, wanted)

    async def take(self, peer: str, prefix: HashedTokens, first: int, part: KvChain, kind: HotPrefixKind) -> int:
        reference = asyncio.get_running_loop().create_future()
        reference.set_result(part)
        held: int = await self._ask("take_kv", peer, prefix, first, [reference], kind)
        self.sent += [(peer, block_hash) for block_hash in split_chain(part.header.hashes)]
        return held

    async def _ask(self, question: Question, peer: str, *args: Any) -> Any:
        if self.left.get(peer, 1) <= 0:
            raise HolderLost("killed")
        if peer in self.left:
            self.left[peer] -= 1
        return await getattr(self.answers[peer], question)(*args)
