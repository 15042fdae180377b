"""``server_cls`` of an ``LLMConfig``: Ray's LLM server with a cache that routers know, separated by tenants."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.llm import LLMServer

from router.feed import FeedPublisher
from router.serve.request_router import FEED_METADATA
from serve_app.engine.vllm.event_endpoints import EventEndpoints
from serve_app.logs import log_at_once
from serve_app.ray_llm.requests import RecentAnswer
from serve_app.ray_llm.scopes import DEFAULT_TENANT_HEADER, METADATA, TENANT_HEADER, EngineFacts, Scopes
from serve_app.ray_llm.tenant_header import TenantMiddleware

logger = logging.getLogger("ray.serve")


class WarmLLMServer(LLMServer):  # type: ignore[misc]
    """Ray's own server, on both of its paths; answers are vLLM's."""

    def _init_shared(self, llm_config: Any, *more: Any) -> None:
        """Set vLLM's start arguments before Ray makes its engine."""
        log_at_once()
        super()._init_shared(llm_config, *more)
        if (llm_config.engine_kwargs.get("data_parallel_size") or 1) > 1:
            raise ValueError("data_parallel_size: each rank has a cache of its own; raise num_replicas instead")
        header = str(llm_config.experimental_configs.get(TENANT_HEADER, DEFAULT_TENANT_HEADER))
        if not header:
            logger.warning("%s is off: all requests share one cache", TENANT_HEADER)
        self._scopes = Scopes(llm_config.model_id, header)
        self._header = header
        self._endpoints = EventEndpoints.create()
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._endpoints.publish,
            "replay_endpoint": self._endpoints.replay,
        }
        llm_config.update_engine_kwargs(enable_prefix_caching=True, kv_events_config=events)

    def _get_default_engine_class(self) -> Any:
        from serve_app.ray_llm.engine import WarmEngine

        return WarmEngine

    async def start(self) -> None:
        """Start vLLM, then follow its events."""
        await super().start()
        self._name = serve.get_replica_context().replica_id.unique_id
        self._feed = FeedPublisher(self._name, host=ray.util.get_node_ip_address())
        self._feed.start()
        size = self.engine.follow(self._endpoints, self._scopes, self._feed)
        config = self._llm_config
        source = config.get_engine_config().actual_hf_model_id
        self._facts = EngineFacts(config.model_id, source, size, self._header, self._scopes.check)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Advertise the feed, and the facts that a router needs to predict."""
        return {FEED_METADATA: msgspec.structs.asdict(self._feed.endpoint), METADATA: asdict(self._facts)}

    async def check_health(self) -> None:
        """Raise if the engine or the feed has failed, so that Serve replaces this replica."""
        await super().check_health()
        if not self._feed.healthy():
            raise RuntimeError("the feed publishes nothing: routers do not know the blocks of this replica")

    async def recent_answers(self, numbers: dict[str, int]) -> tuple[str, int, list[RecentAnswer]]:
        """Return this replica's name, its last answer's number, and the answers after its own of ``numbers``."""
        answers = self.engine.answers
        return self._name, answers.number, answers.since(numbers.get(self._name, 0))

    async def _run_request(self, request: Any, *, raw_request_info: Any = None, **more: Any) -> Any:
        """Run a request of the standard path for its tenant."""
        self._note_tenant(getattr(raw_request_info, "headers", None) or {})
        return await super()._run_request(request, raw_request_info=raw_request_info, **more)

    async def __serve_build_asgi_app__(self) -> Any:
        """Return vLLM's own app for direct streaming, extended to note each request's tenant."""
        app = await super().__serve_build_asgi_app__()
        app.add_middleware(TenantMiddleware, note=self._note_tenant)
        return app

    def _note_tenant(self, headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
        from serve_app.ray_llm.engine import tenant_now

        tenant_now.set(self._scopes.tenant_in(headers))

    async def __del__(self) -> None:
        if (engine := getattr(self, "engine", None)) is not None and hasattr(engine, "unfollow"):
            await asyncio.to_thread(engine.unfollow)
        if (feed := getattr(self, "_feed", None)) is not None:
            await asyncio.to_thread(feed.stop)
        await super().__del__()
        self._endpoints.remove()
