"""A small application beside Ray's: what its router knows, and where a request would go, each by the caller's key."""

import asyncio
from types import SimpleNamespace
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from router.policy.policies import POLICIES
from router.serve.core_registry import router_for
from router.serve.request_router import deployment_key
from serve_app.ray_compat import use_outside_of_replicas
from serve_app.ray_llm.router import WarmRouter


class CacheApp:
    """``GET /state`` and ``POST /explain``, with the body and headers of a chat or a completion."""

    def __init__(self, application: str, deployment: str) -> None:
        """``deployment``: of the LLM server, as ``serve status`` has it."""
        self._key = application, deployment
        self._handle: DeploymentHandle | None = None

    async def __call__(self, request: Any) -> Any:
        """Answer; Serve makes JSON of it."""
        router = self._router()
        if router is None or not router.knows_every_cache:
            return {"error": "this router has not heard from every replica yet; ask again"}
        if request.url.path.endswith("/state"):
            core = router.core
            unplaced = {name: sum(value for _, _, value in report.samples) for name, report in core.stats().items()}
            return {**core.state(), "routed_by_load": dict(router.by_load), "unplaced_kv_blocks": unplaced}
        body = SimpleNamespace(**await request.json())
        return await asyncio.wrap_future(router.explain_soon(body, dict(request.headers), list(POLICIES)))

    def _router(self) -> WarmRouter | None:
        """Return this process's own router, which knows the caches as every other one does."""
        if self._handle is None:
            application, deployment = self._key
            self._handle = serve.get_deployment_handle(deployment, application)
            use_outside_of_replicas(self._handle)
        router: WarmRouter | None = router_for(deployment_key(*self._key))
        return router


def build_cache_app(arguments: dict[str, Any]) -> Any:
    """Return the application; ``arguments``: ``application`` and ``deployment``, of the LLM server."""
    made = serve.deployment(CacheApp, name="cache", ray_actor_options={"num_cpus": 0})
    return made.bind(arguments["application"], arguments["deployment"])
