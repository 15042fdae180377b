"""KV of other replicas for requests routed with a holder: decides to copy or compute, and tracks waiting requests.

Everything runs in the replica's loop; a waiting request starts when its ``RemoteKv`` is done, with the arrived blocks.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from opentelemetry.trace import Span

from router.protocol.block_hash import HASH_BYTES, common_blocks
from router.protocol.samples import Histogram, Labels, Sample
from serve_app.cache.kv_chain import KvChain, TransferError
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import Clock, Engine, EngineError, EngineRequest, RemoteKv
from serve_app.replica.peers import HolderLost, NoPart, PulledPart, WantedPart
from serve_app.replica.pull_rate import PullRate, expected_tokens_per_s
from serve_app.tracing import ReplicaTrace, end_pull

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 * 1024 * 1024
"""Bytes per request to a holder: neither side's loops stop for longer than it takes to copy them."""

LEAST_DEADLINE_S = 0.25
UNKNOWN_DEADLINE_S = 5.0

PullRefusal = Literal["off", "held", "short", "slow", "busy"]
"""Why a planned pull was not begun: switched off, already here, too little, slower than computing, too many pulls."""

PullOutcome = Literal["whole", "part", "late", "gone", "holder_busy", "holder_lost", "no_room", "invalid", "failed"]
"""How a pull ended: "part" brought less than planned because the holder had no more; others may have brought some."""

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

FetchPart = Callable[[str, WantedPart], Awaitable[PulledPart]]
"""Requests a part from a replica. Raises HolderLost; may be cancelled."""


@dataclass(slots=True)
class _Pull:
    """One pull of blocks ``first`` to ``last`` - 1 of a request's chain. ``spans``: of the requests waiting for it."""

    request: EngineRequest
    holder: str
    first: int
    last: int
    deadline_s: float
    remote_kv: RemoteKv
    cached: int = 0
    spans: list[Span] = field(default_factory=list)


class PullMeters:
    """Counters of one replica since its start. Belongs to its event loop."""

    def __init__(self) -> None:
        self.refused: Counter[PullRefusal] = Counter()
        self.ended: Counter[PullOutcome] = Counter()
        self.begun = 0
        self.joined = 0
        self.tokens = 0
        self.exported_tokens = 0
        self.exports: Counter[str] = Counter()
        self.seconds = Histogram(_BUCKETS_S)

    def samples(self, labels: Labels, tokens_per_s: float) -> Iterable[Sample]:
        """Yield every counter, and the rate."""
        yield "warmpath_kv_pulls_begun_total", labels, float(self.begun)
        yield "warmpath_kv_pulls_joined_total", labels, float(self.joined)
        for outcome, count in self.ended.items():
            yield "warmpath_kv_pulls_total", (*labels, ("outcome", outcome)), float(count)
        for reason, count in self.refused.items():
            yield "warmpath_kv_pulls_refused_total", (*labels, ("reason", reason)), float(count)
        for answer, count in self.exports.items():
            yield "warmpath_kv_exports_total", (*labels, ("outcome", answer)), float(count)
        yield "warmpath_kv_pulled_tokens_total", labels, float(self.tokens)
        yield "warmpath_kv_exported_tokens_total", labels, float(self.exported_tokens)
        yield "warmpath_kv_pull_tokens_per_second", labels, tokens_per_s
        yield from self.seconds.samples("warmpath_kv_pull_seconds", labels)


class Puller:
    """One replica's pulls."""

    def __init__(self, engine: Engine, fetch: FetchPart, config: AppConfig, *, clock: Clock = time.monotonic) -> None:
        self.meters = PullMeters()
        self._engine = engine
        self._fetch = fetch
        self._config = config
        self._enabled = config.kv_pull and config.enable_prefix_caching
        self._size = config.block_size
        self._clock = clock
        self._block_bytes = max(engine.kv_block_bytes, 1)
        self._rate = PullRate(expected_tokens_per_s(self._size, self._block_bytes))
        self._under_way: dict[asyncio.Task[None], _Pull] = {}

    @property
    def tokens_per_s(self) -> float:
        """The rate reported to routers; 0.0 if this replica pulls nothing."""
        return self._rate.tokens_per_s(self._clock()) if self._enabled else 0.0

    def begin(self, request: EngineRequest, trace: ReplicaTrace | None = None) -> RemoteKv | None:
        """Decide again with local knowledge, and begin to copy the prefix that the router's decision names.

        Returns the KV that the request waits for, or None. A request with a prefix already in transit waits for that
        pull, whether its decision names a holder or not.
        """
        decision = request.decision
        holder, tokens = ("", 0) if decision is None else (decision.pull_from, decision.pull_tokens)
        if not request.block_hashes or not (holder or self._under_way):
            return None
        size = self._size
        usable = (len(request.token_ids) - 1) // size
        cached = self._engine.cached_blocks(request.block_hashes, usable)
        for pull in self._under_way.values():
            common = min(common_blocks(pull.request.block_hashes, request.block_hashes), pull.last, usable)
            if (common - max(cached, pull.first)) * size >= self._config.min_pull_tokens and pull.first <= cached:
                self.meters.joined += 1
                if trace is not None:
                    pull.spans.append(trace.pull(pull.holder, common * size, joined=True))
                return RemoteKv(common * size, of=pull.remote_kv)
        if not holder:
            return None
        most = max(1, self._config.max_pull_bytes // self._block_bytes)
        last = min(tokens // size, usable, cached + most)
        prefill_rate = self._engine.load().prefill_tokens_per_s
        refusal = self._refusal((last - cached) * size, prefill_rate)
        if refusal is not None:
            self.meters.refused[refusal] += 1
            return None
        compute_s = (last - cached) * size / prefill_rate if prefill_rate else UNKNOWN_DEADLINE_S
        pull = _Pull(
            request, holder, cached, last, max(compute_s, LEAST_DEADLINE_S), RemoteKv(last * size), cached=cached
        )
        self.meters.begun += 1
        if trace is not None:
            pull.spans.append(trace.pull(holder, (last - cached) * size, joined=False))
        task = asyncio.get_running_loop().create_task(self._run(pull))
        self._under_way[task] = pull
        task.add_done_callback(self._under_way.pop)
        return pull.remote_kv

    async def stop(self) -> None:
        """End running pulls; requests that wait for them continue without."""
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _refusal(self, tokens: int, prefill_tokens_per_s: float) -> PullRefusal | None:
        if not self._enabled:
            return "off"
        if tokens <= 0:
            return "held"
        if tokens < self._config.min_pull_tokens:
            return "short"
        if self.tokens_per_s <= prefill_tokens_per_s:
            return "slow"
        return "busy" if len(self._under_way) >= self._config.max_pulls else None

    async def _run(self, pull: _Pull) -> None:
        started_s = self._clock()
        outcome: PullOutcome = "failed"
        try:
            async with asyncio.timeout(pull.deadline_s):
                outcome = await self._copy(pull)
        except TimeoutError:
            outcome = "late"
        except HolderLost:
            outcome = "holder_lost"
        except TransferError as error:
            outcome = "invalid"
            logger.warning("KV from replica %s was refused: %s", pull.holder, error)
        except EngineError:
            pass
        except Exception:
            logger.exception("a pull from replica %s failed", pull.holder)
        finally:
            duration_s = self._clock() - started_s
            tokens = (pull.cached - pull.first) * self._size
            if tokens or outcome == "late":
                self._rate.observe(tokens, duration_s, self._clock())
            self.meters.ended[outcome] += 1
            self.meters.tokens += tokens
            self.meters.seconds.observe(duration_s)
            for span in pull.spans:
                end_pull(span, outcome, tokens)
            pull.remote_kv.end()
            self._engine.wake()

    async def _copy(self, pull: _Pull) -> PullOutcome:
        """Copy piece after piece; ``pull.cached`` tracks the progress."""
        request = pull.request
        prefix = HashedTokens(request.scope, request.identity, request.block_hashes, request.tenant)
        piece_blocks = max(1, PIECE_BYTES // self._block_bytes)
        while pull.cached < pull.last:
            count = min(piece_blocks, pull.last - pull.cached)
            copied = await copy_part(self._engine, self._fetch, pull.holder, prefix, pull.cached, count, self._size)
            if not isinstance(copied, tuple):
                return "part" if pull.cached > pull.first else "gone" if copied == "gone" else "holder_busy"
            arrived = pull.cached + copied[1]
            pull.cached = max(pull.cached, min(copied[0], pull.last))
            if pull.cached < arrived:
                return "no_room"
        return "whole"


async def copy_part(
    engine: Engine,
    fetch: FetchPart,
    holder: str,
    prefix: HashedTokens,
    first: int,
    count: int,
    block_size: int,
    *,
    demote: bool = True,
) -> tuple[int, int] | NoPart:
    """Copy up to ``count`` blocks; return leading ones held, and arrived. Raises HolderLost or a TransferError."""
    end = first + count
    ids = np.ascontiguousarray(prefix.token_ids[: end * block_size], dtype="<i4")
    chain = prefix.chain[: end * HASH_BYTES]
    part = await fetch(holder, WantedPart(prefix.scope, chain, ids.tobytes(), first, count, demote))
    if not isinstance(part, KvChain):
        return part
    # A copy into the pool that has begun is finished, even past a deadline.
    cached = await asyncio.shield(asyncio.to_thread(engine.transfer.import_part, part, prefix, first))
    return cached, part.header.blocks
