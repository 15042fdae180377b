"""The other replicas, and questions to them by Serve handle calls; answers are mapped from the object store."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from router.protocol.block_hash import PrefixScope
from router.protocol.request import NoReplicaLeft
from router.serve.core_registry import running_replicas
from router.serve.request_router import deployment_key
from serve_app.cache.kv_chain import KvChain
from serve_app.cache.prefix.hot_prefixes import HashedTokens, HotPrefixes, HotPrefixKind, SavedPrefix
from serve_app.engine.protocol import AdapterSpec, CacheRoom

logger = logging.getLogger(__name__)

T = TypeVar("T")

Question = Literal["export_kv", "offer_hot", "survey_cache", "take_kv", "keep_save"]
"""A method of ``PeerAnswers``."""


class HolderLost(Exception):
    """The asked replica is gone."""


@dataclass(frozen=True, slots=True)
class WantedPart:
    """A request for KV from another replica: at most ``most_blocks`` blocks from ``first`` on, of a prefix of exactly
    this scope. ``token_ids``: int32-LE bytes from the prompt's start, ``block_hashes`` their packed chain.
    ``demote``: as in ``KvTransfer.export_prefix``."""

    scope: PrefixScope
    block_hashes: bytes
    token_ids: bytes
    first: int
    most_blocks: int
    demote: bool = True


NoPart = Literal["gone", "busy"]
PulledPart = KvChain | NoPart
"""A part; or nothing: the holder has no more of it ("gone"), or too many exports already ("busy")."""


@dataclass(frozen=True, slots=True)
class HotOffer:
    """A peer's prefixes, the hottest first, and the adapters in its memory, the last used first."""

    prefixes: HotPrefixes
    adapters: tuple[AdapterSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Survey:
    """``known``: the number of leading blocks held of each run; ``room``: the space for others."""

    known: tuple[int, ...]
    room: CacheRoom


class Peers:
    """The peers of this process's replica. Every question raises HolderLost; cancelling it cancels the call.

    ``running``: the replicas known to this process's router. The constructor starts that router, so that a starting
    replica knows its peers by the time it can ask them.
    """

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self.running = running_replicas(deployment_key(context.app_name, context.deployment))
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        self._handle: DeploymentHandle = handle.options(_by_reference=True, method_name="answer_peer")

    async def fetch(self, holder: str, part: WantedPart) -> PulledPart:
        """Ask for a part of a prefix's KV."""
        return cast(PulledPart, await self._ask("export_kv", holder, part))

    async def offer(self, peer: str, most_blocks: int) -> HotOffer:
        """Ask for a peer's hottest prefixes."""
        return cast(HotOffer, await self._ask("offer_hot", peer, most_blocks))

    async def survey(self, peer: str, runs: Sequence[bytes]) -> Survey:
        """Ask how much of these runs of blocks a peer holds, and for its free space."""
        return cast(Survey, await self._ask("survey_cache", peer, runs))

    async def take(self, peer: str, prefix: HashedTokens, first: int, part: KvChain, kind: HotPrefixKind) -> int:
        """Give a peer blocks; return how many leading ones of the prefix it then holds, -1 if it refused them."""
        reference = await asyncio.to_thread(ray.put, part)
        return cast(int, await self._ask("take_kv", peer, prefix, first, [reference], kind))

    async def keep(self, peer: str, saved: SavedPrefix, prefix: HashedTokens) -> bool:
        """Ask a peer to keep a save; return whether it does."""
        return cast(bool, await self._ask("keep_save", peer, saved, prefix))

    async def _ask(self, question: Question, peer: str, *args: Any) -> Any:
        try:
            response = self._handle.remote(question, *args, target=peer)
        except RayServeException as error:
            raise HolderLost(str(error)) from error
        try:
            answer = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (RayError, RayServeException, NoReplicaLeft) as error:
            raise HolderLost(type(error).__name__) from error
        if isinstance(answer, str) and answer == "lost":
            raise HolderLost("it is gone")
        return answer


async def ask_all(
    peers: Sequence[str], ask: Callable[[str], Awaitable[T]], time_s: float, lost: set[str]
) -> dict[str, T]:
    """Ask all peers at once and return their answers; dead or too slow ones are added to ``lost`` instead."""

    async def answer_of(peer: str) -> None:
        try:
            async with asyncio.timeout(time_s):
                answers[peer] = await ask(peer)
        except (HolderLost, TimeoutError) as error:
            logger.info("replica %s does not answer: %s", peer, error)
            lost.add(peer)

    answers: dict[str, T] = {}
    await asyncio.gather(*map(answer_of, peers))
    return {peer: answers[peer] for peer in peers if peer in answers}
