"""``request_router_class`` of an ``LLMConfig``: exact, tenant-safe routing on both of Ray's paths.

On the standard path Serve asks for a replica with the parsed request and its headers. With direct streaming Ray's
``LLMRouter`` asks with the raw body's fields, but of the headers only with Serve's session id.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from ray.serve.request_router import PendingRequest, RunningReplica
from ray.util import metrics

from router.core import RoutingCore
from router.load import RESERVATION_TTL_S
from router.protocol.events import Event, LoadReport, request_key, unpack_keys
from router.protocol.request import Decision, RoutedRequest
from router.serve.core_registry import register_router
from router.serve.request_router import CacheAwareRouter, deployment_key
from serve_app.ray_compat import check_llm_headers, session_header
from serve_app.ray_llm.requests import OpenDecisions
from serve_app.ray_llm.scopes import METADATA, EngineFacts, Scopes
from serve_app.ray_llm.tenant_header import only_value

logger = logging.getLogger("ray.serve")

RESERVED_S = 2.0
"""After this time a request that no replica has reported no longer counts as load: vLLM may have refused it."""

MAX_OPEN = 4096
"""Limit of decisions without a reported first token; the oldest are dropped, and all after ``RESERVATION_TTL_S``."""


class WarmRouter(CacheAwareRouter):
    """Routes by the data that replicas advertise; a request that cannot be keyed goes to the least loaded replica."""

    def initialize_state(self, **settings: Any) -> None:
        """Store the ``request_router_kwargs`` (of ``RouterSettings``). As in Ray, requests wait for a replica."""
        super().initialize_state(**{"no_replica_wait_s": math.inf, **settings})
        self.by_load: Counter[str] = Counter()
        self._routed = metrics.Counter("warm_router_requests", "Requests by the reason of their route.", ("reason",))
        self._open = OpenDecisions(MAX_OPEN, RESERVATION_TTL_S)
        register_router(deployment_key(self._deployment_id.app_name, self._deployment_id.name), self)
        self._facts: EngineFacts | None = None
        self._scopes: Scopes | None = None
        self._prompts: Any = None
        self._loading: asyncio.Task[None] | None = None
        check_llm_headers(self._check)  # Ray makes a router for its ingress' first request, so not of that one

    @property
    def core(self) -> RoutingCore:
        """The router's knowledge of the replicas."""
        return self._core

    @property
    def knows_every_cache(self) -> bool:
        """Whether the router can predict: it follows all feeds, and the tokenizer is loaded."""
        return self._core.knows_every_cache and self._prompts is not None

    @property
    def model(self) -> str:
        """The model's id, "" before the first replica."""
        return "" if self._facts is None else self._facts.model

    def explain_soon(self, body: Any, tenant: str, policies: list[str]) -> Future[dict[str, Any]]:
        """Explain, in the router's loop, the routing of a tenant's request; any thread may wait for the result."""

        async def explain() -> dict[str, Any]:
            route = await self._route("explain", body, tenant)
            return {"routed_by_load": True} if route is None else self._core.explain(route, policies)

        return asyncio.run_coroutine_threadsafe(explain(), self._event_loop)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Learn the engines' facts before following their feeds: hashes depend on the block size."""
        metadata = [replica.replica_metadata.get(METADATA) for replica in replicas]
        facts = next((EngineFacts(**values) for values in metadata if values), None)
        if facts is not None and facts != self._facts:
            self._learn(facts)
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Decide for direct streaming, and reserve here: Ray asks once per request, and reports no result."""
        if pending_request is None:
            return await super().choose_replicas(candidate_replicas, pending_request)
        pending_request.routing_context.should_backoff = True  # else Serve asks without a pause while all are full
        chosen = self._choose(pending_request, await self.route_of(pending_request), is_retry=False)
        return [] if chosen is None else [[chosen]]

    def _decided(self, route: RoutedRequest, decision: Decision) -> None:
        """Remember a request by its prompt's key, to recognise it in its replica's reports."""
        self._routed.inc(tags={"reason": decision.reason})
        self._event_loop.call_later(RESERVED_S, self._core.reported, decision)
        key = decision.replica_id, request_key(route.block_hashes, route.prompt_tokens)
        for forgotten in self._open.add(key, decision, time.monotonic()):
            self._core.release(forgotten)

    def _heard(self, replica_id: str, events: Iterable[Event]) -> None:
        """Track this router's requests by their keys too: neither of Ray's paths carries a decision to a replica."""
        events = list(events)
        super()._heard(replica_id, events)
        for report in (event for event in events if isinstance(event, LoadReport)):
            for key in unpack_keys(report.arrived):
                for decision in self._open.of((replica_id, key)):
                    self._core.reported(decision)
            for key in unpack_keys(report.begun):
                for decision in self._open.take((replica_id, key)):
                    self._core.release(decision)

    async def route_of(self, pending_request: PendingRequest) -> RoutedRequest | None:
        """Return a request as the router sees it, or None: it is counted, and goes to the least loaded replica."""
        arguments, metadata = pending_request.args, pending_request.metadata
        if not arguments or self._loading is None:
            return self._unkeyed("no prompt")
        try:
            await asyncio.shield(self._loading)
            if self._facts is None or self._scopes is None:
                return self._unkeyed("no tokenizer")
            if len(arguments) > 1:
                tenant = self.tenant(getattr(arguments[1], "headers", None) or {})
            elif self._facts.tenant_header in ("", session_header()):
                tenant = self._scopes.tenant_of(metadata.session_id or "")
            else:
                return self._unkeyed("tenant unknown")
            route = await self._route(metadata.request_id, arguments[0], tenant)
            return route or self._unkeyed("media, several prompts, or refused by the template")
        except Exception:
            self._fault("reading a request")
            return None

    def _check(self, headers: Iterable[tuple[str, str]]) -> None:
        """Raise RepeatedTenant for a request that names two tenants, once the tenants' header is known."""
        if self._facts is not None:
            only_value(headers, self._facts.tenant_header.lower())

    def _unkeyed(self, reason: str) -> RoutedRequest | None:
        """Count a request that is routed by load."""
        self.by_load[reason] += 1
        self._routed.inc(tags={"reason": f"by load: {reason}"})
        return None

    def tenant(self, headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> str:
        """Return the tenant of a request's headers, "" if tenants are not separated. Raises RepeatedTenant."""
        assert self._scopes is not None
        return self._scopes.tenant_in(headers)

    async def _route(self, request_id: str, body: Any, tenant: str) -> RoutedRequest | None:
        facts, scopes = self._facts, self._scopes
        assert facts is not None and scopes is not None
        model = getattr(body, "model", None) or facts.model
        lora = "" if model == facts.model else model
        root = scopes.root(tenant, lora, getattr(body, "cache_salt", None))
        prompt = await self._prompts.encode(body, root, tenant)
        if prompt is None:
            return None
        encoded, placement = prompt
        tokens = len(encoded.token_ids)
        return RoutedRequest(
            request_id, encoded.block_hashes, tokens, placement, adapter=lora, tenant=tenant, reads_kv=_reads_kv(body)
        )

    def _learn(self, facts: EngineFacts) -> None:
        self._facts, self._prompts = facts, None
        self._core.configure(replace(self._core.settings, block_size=facts.block_size))
        self._loading = self._event_loop.create_task(self._load(facts))

    async def _load(self, facts: EngineFacts) -> None:
        """Load the tokenizer for predictions; without it requests are routed by load."""
        try:
            scopes = Scopes(facts.model, facts.tenant_header)
            if scopes.check != facts.secret_check:
                raise ValueError("the replicas have another secret: set WARMPATH_SECRET to one value on every node")
            from serve_app.ray_llm.prompts import PromptEncoder

            prompts = await asyncio.to_thread(PromptEncoder, facts.source, facts.block_size)
            self._scopes = scopes
            self._prompts = prompts  # last: its presence tells another thread that everything is loaded
        except Exception:
            logger.exception("requests for %s are routed by load alone", facts.model)


def _reads_kv(body: Any) -> bool:
    """Return whether vLLM reads cached blocks for a body: not for the log-probabilities of its prompt."""
    count = getattr(body, "prompt_logprobs", None)
    if count is None and getattr(body, "echo", False):
        count = getattr(body, "logprobs" if getattr(body, "messages", None) is None else "top_logprobs", None)
    return count is None
