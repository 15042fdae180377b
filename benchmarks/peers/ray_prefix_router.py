"""Ray's PrefixCacheAffinityRouter in front of plain servers: a Serve application with a replica for each server.

`python -m benchmarks.peers.ray_prefix_router --port P --worker-urls URL ...`
"""

# No `from __future__ import annotations`: FastAPI resolves the route's annotations inside `application`.
import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import StreamingResponse

from benchmarks.common.server import server_process
from serve_app.cli.local_ray import held_port

ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
"""Not from ``ray.serve.llm.request_router``, which needs all packages of Ray's LLM deployments."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One request. Ray's class reads ``messages``; a server gets ``body``."""

    messages: list[dict[str, Any]]
    body: bytes


class Proxy:
    """A replica that passes requests on to one server, claimed by a file in ``folder``."""

    def __init__(self, urls: Sequence[str], folder: str) -> None:
        self._url = next(url for number, url in enumerate(urls) if _claimed(Path(folder) / str(number)))
        self._client = httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None))

    async def chat(self, call: ChatCall) -> AsyncIterator[bytes]:
        """Yield the bytes of the server's stream. Raises httpx.HTTPStatusError when it refuses."""
        url, headers = f"{self._url}/v1/chat/completions", {"content-type": "application/json"}
        async with self._client.stream("POST", url, content=call.body, headers=headers) as response:
            response.raise_for_status()
            async for part in response.aiter_raw():
                yield part


def _claimed(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def application(urls: Sequence[str], folder: str) -> serve.Application:
    """Return an ingress in front of as many proxies as there are servers."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000)
    @serve.ingress(app)
    class Front:
        """Streams a proxy's answer to a request."""

        def __init__(self, proxies: DeploymentHandle) -> None:
            self._chat = proxies.options(method_name="chat", stream=True)

        @app.post("/v1/chat/completions")
        async def chat(self, request: Request) -> StreamingResponse:
            """Route by the messages."""
            body = await request.body()
            call = ChatCall(json.loads(body)["messages"], body)
            return StreamingResponse(self._chat.remote(call), media_type="text/event-stream")

        @app.get("/health")
        async def health(self) -> dict[str, str]:
            """Answer while this process serves."""
            return {}

    proxies = serve.deployment(
        num_replicas=len(urls),
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )(Proxy)
    return Front.bind(proxies.bind(urls, folder))  # type: ignore[attr-defined]


@contextmanager
def ray_prefix_router(workers: Sequence[str]) -> Iterator[str]:
    """Run it over servers and yield its URL. Raises BenchmarkError when it does not come up."""
    with held_port() as port:
        command = [sys.executable, "-m", "benchmarks.peers.ray_prefix_router", "--port", str(port)]
        url = f"http://127.0.0.1:{port}"
        with server_process([*command, "--worker-urls", *workers], f"{url}/health"):
            yield url


async def _until_told_to_end() -> None:
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    await told.wait()


def main() -> None:
    """Serve until told to end, on loopback only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker-urls", nargs="+", required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": arguments.port}, proxy_location="HeadOnly")
            serve.run(application(arguments.worker_urls, folder), name="ray_prefix")
            asyncio.run(_until_told_to_end())
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main()
