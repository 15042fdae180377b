"""The Serve deployment around one engine: calls in, token chunks out, cache events and load to the routers.

The engine runs in its own thread; everything here runs in the replica's loop.
"""

import asyncio
import logging
import os
import platform
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import ray
from msgspec import structs
from ray import serve

from router.background import LOOPS, run_in_background
from router.feed import FeedPublisher
from router.policies import is_outdated
from router.protocol.autoscaling import SEATS
from router.protocol.block_hash import HASH_BYTES, PrefixScope
from router.protocol.events import LoadReport, StatsReport, pack_adapters
from router.protocol.samples import Sample
from serve_app.checkpoints.adapter_registry import AdapterEntry
from serve_app.checkpoints.limits import max_model_len, pin_budget_blocks
from serve_app.checkpoints.sources import load_served_model
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import (
    CheckpointInfo,
    EngineError,
    EngineOutput,
    EngineRequest,
    ErrorKind,
    ExternalEngine,
    Prefilled,
    QueueFull,
    RequestTooLong,
    SamplingParams,
    to_wire,
)
from serve_app.engine.token_channel import TokenSender, TokenStream
from serve_app.logs import log_at_once
from serve_app.notices import board_name
from serve_app.reconfigure import LiveSettings
from serve_app.replica.adapter_loader import ReplicaAdapters
from serve_app.replica.data_parallel import gang_rank
from serve_app.replica.grammars import ReplicaMatchers
from serve_app.replica.lifecycle.answers import PeerAnswers
from serve_app.replica.lifecycle.handover import MoveMeters
from serve_app.replica.lifecycle.lifecycle import Lifecycle
from serve_app.replica.peers import Peers, Question
from serve_app.replica.pull import Puller
from serve_app.replica.reporter import Reporter, attributes_of, replica_figures, tell_caches
from serve_app.replica.running_calls import STOPPING, RunningCalls
from serve_app.replica.seats import Seats
from serve_app.replica.session_gate import SessionGate
from serve_app.structured.compiler import GrammarError
from serve_app.tenancy.weights import TenantWeights
from serve_app.tenants import forget_secret
from serve_app.tracing import ReplicaTrace, open_tracer

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 1024
"""Prompt of the warm-up: long enough that kernels of long prefills are compiled before the first request."""

FROM_ZERO_TOKENS = 64
"""The same where requests wait for a first replica: they would wait longer for a long one than it saves them."""

BEHIND_INGRESSES = 4
"""Niceness above Ray's other workers, of a replica that computes on processors: who answers comes before."""


class Replica:
    """One engine, its prefix cache and its feed, as a Ray Serve replica."""

    async def __init__(self, config: dict[str, Any]) -> None:  # type: ignore[misc]
        # Imported here: deploying processes import this class, and should not wait for torch.
        from serve_app.replica.engine_factory import make_engine

        log_at_once()
        forget_secret()  # Ray's processes inherit the node's; replicas get the keys of scopes with each request
        self._ending = AsyncExitStack()
        self._live = await LiveSettings.start(config)
        if not ray.get_gpu_ids() and not self._config.engine_traits.external:
            os.nice(BEHIND_INGRESSES)
        self._version = zlib.crc32(msgspec.json.encode(config, order="deterministic"))
        self._loop = asyncio.get_running_loop()
        self._replica_id: str = serve.get_replica_context().replica_id.unique_id
        self._tracer = open_tracer(self._config.otlp_endpoint, "replica", self._replica_id)
        if self._tracer is not None:
            self._ending.push_async_callback(asyncio.to_thread, self._tracer.close)
        peers = Peers()
        info = await asyncio.to_thread(load_served_model, self._config)
        # While another model takes a name over, ingresses still send requests that were made for the one before.
        self._only = info if self._live.one_of_several else None
        self._feed = FeedPublisher(self._replica_id, host=ray.util.get_node_ip_address())
        self._ending.push_async_callback(asyncio.to_thread, self._feed.stop)
        self._feed.start()
        self._engine = await asyncio.to_thread(make_engine, self._config, info, self._feed.put)
        if isinstance(self._engine, ExternalEngine):
            self._engine.share(Seats(serve.get_replica_context().app_name, self._replica_id).take)
        self._ending.push_async_callback(asyncio.to_thread, self._engine.stop)
        sender = TokenSender()
        self._ending.push_async_callback(asyncio.to_thread, sender.close)
        self._running = RunningCalls(sender, self._engine.cancel)
        self._adapters = ReplicaAdapters(self._config, self._engine)
        self._matchers = ReplicaMatchers(self._config, info)
        self._puller = Puller(self._engine, peers.fetch, self._config)
        self._ending.push_async_callback(self._puller.stop)
        self._moves = MoveMeters()
        labels = ray.get_runtime_context().get_node_labels()
        rank = gang_rank()
        own = {} if rank is None else {"data_parallel_rank": float(rank)}
        self._attributes = attributes_of({**own, **self._config.replica_attributes}, labels)
        gpus = ",".join(map(str, ray.get_gpu_ids()))
        self._place = (("pid", str(os.getpid())), ("node", platform.node()), ("gpu", gpus))
        self._lifecycle = Lifecycle(self._config, self._engine, self._adapters, peers, self._running, self._moves)
        self._answers = PeerAnswers(self._engine, self._adapters.loaded, self._moves, self._puller.meters)
        self._reporter = Reporter(self._load, self._stats, self._feed, self._config.load_report_interval_s)
        await self._adapters.preload()
        self._engine.start()
        if not self._config.engine_traits.external:  # no strange server is warmed up, and none may be there yet
            await self._warm_up(info)
        self._gate = SessionGate(self._engine, self._config)
        self._weights = TenantWeights(self._config.cache_shares, self._use_weights)
        context = serve.get_replica_context()
        board = board_name(context.app_name, context.deployment)
        for work in (self._gate.run, partial(self._weights.follow, board)):
            self._ending.callback(run_in_background(work).cancel)
        await self._lifecycle.join()
        for work in (self._reporter.run, partial(tell_caches, self._engine, self._feed), self._running.watch):
            self._ending.callback(run_in_background(work).cancel)
        self._ending.push_async_callback(self._lifecycle.finish)

    @property
    def _config(self) -> AppConfig:
        return self._live.config

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply new settings while requests run (Serve calls it; ``LiveSettings`` handles bad ones)."""
        with self._lifecycle.departure.reconfiguring():
            await self._live.reconfigure(user_config, self._configure)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Advertise the feed to every router (read by ``CacheAwareRouter``)."""
        return {"feed": msgspec.structs.asdict(self._feed.endpoint), "pid": os.getpid()}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this replica's figures for the autoscaling policy; Serve asks every second if autoscaling is on."""
        if isinstance(self._engine, ExternalEngine):
            return {SEATS: float(self._engine.seats)}
        try:
            return replica_figures(self._engine, self._version, self._config).to_floats()
        except Exception:  # else Serve would stop asking
            logger.exception("no figures for autoscaling")
            return {}

    def check_health(self) -> None:
        """Raise if the engine's loop or the feed died or stalled, so that Serve replaces this replica."""
        if not self._engine.healthy():
            raise RuntimeError("the engine loop died or stalled")
        if not self._feed.healthy():
            raise RuntimeError("the feed publishes nothing: routers do not know the blocks of this replica")

    async def describe(self) -> dict[str, Any]:
        """Return this replica's identity; an ingress also calls it once to start its router."""
        return {"replica_id": self._replica_id, "pid": os.getpid()}

    async def sessions(self, tenant: str | None) -> dict[str, Any]:
        """Return the report on this replica's sessions for a tenant, or for an operator (None)."""
        return {"replica": self._replica_id, **self._gate.report(tenant)}

    async def close_sessions(self, tenant: str, names: Sequence[str]) -> int:
        """End a tenant's sessions of some names; return how many have ended here."""
        return self._gate.close(tenant, names)

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks that are not in use."""
        return await asyncio.to_thread(self._engine.reset_prefix_cache)

    async def answer_peer(self, question: Question, *args: Any, target: str) -> Any:
        """Answer a peer (``PeerAnswers``), or "lost" for another ``target``: Serve redirects calls of a dead one."""
        return await getattr(self._answers, question)(*args) if target == self._replica_id else "lost"

    async def end_calls(self, request_ids: Sequence[str], *, target: str) -> list[Prefilled | None]:
        """End abandoned generations; return what was done for their prompts. ``target``: see ``answer_peer``."""
        if target != self._replica_id:
            return [None] * len(request_ids)
        self._running.leave(request_ids)
        return await self._running.prefilled(request_ids)

    async def load_adapter(self, entry: AdapterEntry) -> str:
        """Load an adapter ahead of its requests; return why this replica cannot serve it, or ""."""
        assert entry.spec is not None, "an unloaded name has nothing to load"
        return await self._adapters.load(entry.spec)

    async def drop_adapter(self, key: str) -> bool:
        """Unload an adapter by its key; requests that have begun finish with it."""
        return self._engine.adapters.unload(key)

    async def merge_adapters(self, entries: Sequence[AdapterEntry]) -> None:
        """Remember the deployment's adapters."""
        self._adapters.registry.merge(entries)

    async def known_adapters(self) -> tuple[AdapterEntry, ...]:
        """Return the deployment's adapters, for an ingress that has just started."""
        return self._adapters.registry.entries()

    async def generate(self, request: EngineRequest) -> bytes:
        """Run a request: its outputs go to its address, and its end is returned. Cancelling ends it."""
        request_id, decision = request.request_id, request.decision
        if self._running.closed:
            return to_wire(EngineOutput(request_id, error="unavailable", message=STOPPING))
        if self._only is not None and request.scope.model != self._only.fingerprint:
            if request.tokenizer != self._only.tokenizer or request.scope.lora:
                return to_wire(EngineOutput(request_id, error="other_model", message="this replica has another model"))
            request = for_other_weights(request, self._only.fingerprint)
        if decision is not None and decision.queued_tokens is not None and is_outdated(decision, self._engine.load()):
            return to_wire(EngineOutput(request_id, error="rerouted", load=self._load()))
        try:
            matcher = await self._matchers.matcher(request.grammar, request.tenant) if request.grammar else None
        except GrammarError as error:
            return to_wire(self._refusal(request_id, error))
        trace: ReplicaTrace | None = None
        if self._tracer is not None and request.traceparent:
            trace = ReplicaTrace(self._tracer, request.traceparent, self._replica_id, request.prompt_tokens)
        stream: TokenStream | None = None
        if request.interval_s or trace is not None:
            stream = TokenStream(request.interval_s, trace.saw if trace is not None else None)
        running = self._running.begin(request, stream)
        ended = False
        try:
            remote_kv = self._gate.begin(request)
            if remote_kv is None and request.store_kv:  # a copy would stay in the cache
                remote_kv = self._puller.begin(request, trace)
            if matcher is not None or remote_kv is not None:
                request = structs.replace(request, matcher=matcher, remote_kv=remote_kv)
            try:
                if request.scope.lora:
                    await self._adapters.submit(request, self._on_outputs)
                else:
                    self._engine.submit(request, self._on_outputs)
                self._running.submitted(request_id)
                self._reporter.prefills_changed()
                if trace is not None:
                    trace.submitted()
            except (EngineError, ValueError) as error:
                ended = True
                return to_wire(self._refusal(request_id, error))
            end = await running.end
            ended = True
            return to_wire(end)
        finally:
            self._gate.end(request_id, running.tokens)
            self._running.forget(request_id)
            if trace is not None:
                trace.end()
            if not ended or self._running.closed:
                self._engine.cancel(request_id)

    async def __del__(self) -> None:
        """Stop the engine after the last request; Serve awaits this before it ends the process."""
        if hasattr(self, "_running"):  # not where it was stopped at its start
            self._running.closed = True
        await self._ending.aclose()

    async def _configure(self, config: AppConfig) -> None:
        await self._weights.declare(config.cache_shares)
        if isinstance(self._engine, ExternalEngine):
            self._engine.set_workers(config.workers)

    async def _use_weights(self, weights: Mapping[str, float]) -> None:
        await asyncio.to_thread(self._engine.set_tenant_shares, weights)
        self._gate.set_shares(weights)
        self._matchers.set_shares(weights)

    def _load(self) -> LoadReport:
        """Return the engine's load with the replica's own fields."""
        load = self._engine.load()
        return structs.replace(
            load,
            pull_tokens_per_s=self._puller.tokens_per_s,
            adapters=pack_adapters(self._engine.adapters.loaded),
            adapter_load_s=self._adapters.load_s,
            attributes={**load.attributes, **self._attributes},
        )

    def _stats(self) -> StatsReport:
        pulls = self._puller.meters.samples((), self._puller.tokens_per_s)
        beside: tuple[Sample, ...] = (
            ("warmpath_replica_info", self._place, 1.0),
            ("warmpath_refused_configurations_total", (), float(self._live.refused)),
            ("warmpath_feed_mirror_drift_total", (), float(self._feed.mirror_drifts)),
        )
        return StatsReport(
            (
                *self._engine.stats().samples,
                *pulls,
                *self._moves.samples(),
                *self._gate.samples(),
                *beside,
                *LOOPS.samples(),
            )
        )

    def _on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        self._running.deliver(outputs)
        begun = [output.request_id for output in outputs if output.first is not None]
        for request_id in begun:
            self._gate.first_token(request_id)
        if begun:
            self._reporter.prefills_changed()

    def _refusal(self, request_id: str, error: Exception) -> EngineOutput:
        if isinstance(error, QueueFull):
            return EngineOutput(
                request_id,
                error="queue_full",
                message=str(error),
                retry_after_s=error.retry_after_s,
                reason=error.reason,
            )
        kind: ErrorKind = "invalid"
        if isinstance(error, RequestTooLong):
            kind = "too_long"
        elif isinstance(error, GrammarError):
            kind = "grammar"
        return EngineOutput(request_id, error=kind, message=str(error))

    async def _warm_up(self, info: CheckpointInfo) -> None:
        """Run one short generation, so that lazy set-up does not delay the first request and rates are known."""
        pool = self._config.num_blocks
        room = pool - pin_budget_blocks(self._config, pool) if pool else WARM_UP_TOKENS
        from_zero = not self._config.first_replicas
        most = FROM_ZERO_TOKENS if from_zero else WARM_UP_TOKENS
        tokens = min(most, max_model_len(self._config, info) - 4, room * self._config.block_size - 4)
        await self._generate_once(max(1, tokens), info.vocab_size, new_tokens=1 if from_zero else 4)
        # Keep the blocks that an earlier process left on disk.
        await asyncio.to_thread(partial(self._engine.reset_prefix_cache, tiers=False))

    async def _generate_once(self, tokens: int, vocab_size: int, new_tokens: int) -> None:
        scope = PrefixScope("warm-up", "", b"")
        request = EngineRequest(
            request_id="warm-up",
            token_ids=(np.arange(tokens, dtype=np.int32) % max(1, vocab_size - 1)),
            scope=scope,
            root=scope.root(os.urandom(16)),
            sampling=SamplingParams(max_tokens=new_tokens, temperature=0.0),
            store_kv=False,  # else it would go to the tiers
        )
        running = self._running.begin(request, TokenStream())
        try:
            self._engine.submit(request, self._on_outputs)
        except RequestTooLong:  # layers in groups leave less space in the pool
            self._running.forget("warm-up")
            if tokens == 1:
                raise
            await self._generate_once(tokens // 2, vocab_size, new_tokens)
            return
        end = await asyncio.wait_for(running.end, 120)
        self._running.forget("warm-up")
        if end.error:
            raise RuntimeError(f"the engine failed its warm-up: {end.message}")


def for_other_weights(request: EngineRequest, fingerprint: str) -> EngineRequest:
    """Return a request that was made for other weights, for those of ``fingerprint``: it shares no KV with any."""
    scope = replace(request.scope, model=fingerprint, public_blocks=0)
    return structs.replace(
        request, scope=scope, root=os.urandom(HASH_BYTES), block_hashes=b"", store_kv=False, saves=()
    )
