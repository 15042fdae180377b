"""Ray's vLLM engine, extended: requests get the salt of their scope, and its KV events become a feed for routers.

Imported only in replicas, since it imports vLLM.
"""

import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np

from router.background import run_in_background
from router.feed import FeedPublisher
from router.protocol.block_hash import hash_blocks
from router.protocol.events import StatsReport, request_key
from router.vllm_events.pool import FollowedPool
from router.vllm_events.subscriber import EventSubscriber
from serve_app.engine.vllm.event_endpoints import EventEndpoints
from serve_app.ray_compat import vllm_engine_class
from serve_app.ray_llm.requests import Prefills, RecentAnswers
from serve_app.ray_llm.scopes import Scopes
from serve_app.replica.reporter import Reporter, tell_caches

LOAD_INTERVAL_S = 0.05

tenant_now: ContextVar[str] = ContextVar("tenant", default="")
"""The tenant of the current request in this task."""


_VllmEngine: Any = vllm_engine_class()


class WarmEngine(_VllmEngine):  # type: ignore[misc]
    """Ray's vLLM engine; call ``follow`` once it has started."""

    def follow(self, endpoints: EventEndpoints, scopes: Scopes, feed: FeedPublisher) -> int:
        """Salt all requests from now on, and report vLLM's blocks to ``feed``; return the tokens in a block."""
        config = self._engine_client.vllm_config
        size, blocks = config.cache_config.block_size, config.cache_config.num_gpu_blocks
        self._size, self._scopes = size, scopes
        self._pool = FollowedPool(size, blocks)
        self.answers = RecentAnswers()
        self._prefills = Prefills(config.scheduler_config.max_num_seqs)
        self._reporter = Reporter(self._prefills.report, self._stats, feed, LOAD_INTERVAL_S)
        sockets = endpoints.of_rank(config.parallel_config.data_parallel_rank)
        self._events = EventSubscriber(*sockets, self._pool, feed.put)
        self._events.start()
        self._tasks = [run_in_background(work) for work in (self._reporter.run, partial(tell_caches, self, feed))]
        client = self._engine_client
        self._generate, self._encode = client.generate, client.encode
        client.generate, client.encode = self.generate, self.encode
        return int(size)

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncIterator[Any]:
        """Run vLLM's ``generate`` under the salt of the request's scope."""
        prompt, root = self._salted(prompt, options.get("lora_request"))
        ids, tenant, started_s = prompt.get("prompt_token_ids"), tenant_now.get(), time.monotonic()
        if ids is not None:
            chain = hash_blocks(root, np.asarray(ids, dtype=np.int32), self._size)
            cached_blocks = self._pool.hit(chain, (len(ids) - 1) // self._size)
            self._prefills.arrived(request_id, len(ids) - cached_blocks * self._size, request_key(chain, len(ids)))
            self._reporter.prefills_changed()
        try:
            async for output in self._generate(prompt, sampling_params, request_id, **options):
                if ids is not None:
                    self._prefills.begun(request_id)
                    self._reporter.prefills_changed()
                    cached = output.num_cached_tokens or 0
                    self.answers.add((request_id, tenant, chain, len(ids), cached, time.monotonic() - started_s))
                    ids = None
                yield output
        finally:
            self._prefills.ended(request_id)

    def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, *more: Any, **options: Any
    ) -> AsyncIterator[Any]:
        """Run vLLM's ``encode`` under the salt of the request's scope."""
        prompt, _ = self._salted(prompt, more[0] if more else options.get("lora_request"))
        outputs: AsyncIterator[Any] = self._encode(prompt, pooling_params, request_id, *more, **options)
        return outputs

    def _salted(self, prompt: Any, lora: Any) -> tuple[dict[str, Any], bytes]:
        """Return a salted prompt, and its scope's root. Raises ValueError for a prompt that cannot carry a salt."""
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if not isinstance(prompt, dict):
            raise ValueError("this kind of prompt cannot be separated by tenant; send text, messages or token ids")
        root = self._scopes.root(tenant_now.get(), lora.lora_name if lora else "", prompt.get("cache_salt"))
        return {**prompt, "cache_salt": root.hex()}, root

    async def check_health(self) -> None:
        """Raise if vLLM, or the thread that hears its events, has failed."""
        await super().check_health()
        if self._events.failed:
            raise RuntimeError("the listener of vLLM's events stopped: routers do not know the blocks of this replica")

    def unfollow(self) -> None:
        """Stop listening and reporting; may be called again."""
        for task in self._tasks:
            task.cancel()
        self._events.stop()

    def _stats(self) -> StatsReport:
        labels = (("engine", "ray_llm"),)
        return StatsReport((("warmpath_unplaced_kv_blocks_total", labels, float(self._pool.unplaced)),))

    def tell_cache(self, *, anew: bool = False) -> None:
        """Send a digest of the pool by vLLM's events so far; ``anew``: all its blocks first."""
        self._events.tell(anew=anew)
