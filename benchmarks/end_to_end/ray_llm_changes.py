"""Inside Ray Serve LLM: what clients see of a killed replica, which Serve replaces, of an added and of a removed one.

A few clients ask the same prompts again and again behind our router and behind plain Ray, one after the other. For each
change: failed requests, and hit rates of 50 requests: before it, the second 50 after it began, and the second 50 after
as many replicas as there should be serve.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from benchmarks.common.prompts import text_of
from benchmarks.common.report import BenchmarkError, names_of, parser_of, write
from benchmarks.peers.ray_llm import MODEL, ROUTERS, RayLlm, application, ray_llm
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.cli.bench.client import RequestFailed, chat_body, stream_answer

BACK_WITHIN = 50
"""Requests after a change, before the hit rate counts again."""
CHANGE_TIMEOUT_S = 300


def main() -> None:
    """Parse flags, run each router, write the JSON."""
    parser = parser_of(__doc__, "demo")
    parser.add_argument("--routers", type=names_of(ROUTERS), default="warmpath,power_of_two")
    parser.add_argument("--direct", action="store_true", help="direct streaming")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5, help="one after the other, each once two replicas serve again")
    arguments = parser.parse_args()
    results = {}
    for router in arguments.routers:
        with ray_llm(_document(router, 2, arguments), f"/{router}/v1/models", direct=arguments.direct) as ray:
            results[router] = asyncio.run(Load(ray, router, arguments).run())
    write(arguments.json, vars(arguments), results, summary(results))


def _document(router: str, replicas: int, arguments: argparse.Namespace) -> dict[str, Any]:
    engine = {"max_model_len": arguments.prompt_tokens + 200, "num_gpu_blocks_override": 400}
    app = application(router, resolve_model(arguments.model), engine, replicas)
    return {"applications": [app]}


class Load:
    """Clients that go on while replicas change. ``_hits``: of each request in its order, None for a failed one."""

    def __init__(self, ray: RayLlm, router: str, arguments: argparse.Namespace) -> None:
        self._ray = ray
        self._router = router
        self._arguments = arguments
        self._hits: list[float | None] = []

    async def run(self) -> dict[str, Any]:
        """Return each change's figures."""
        stopped = asyncio.Event()
        clients = [asyncio.create_task(self._ask(number, stopped)) for number in range(self._arguments.clients)]
        try:
            await self._until(lambda: self._ray.running(self._router) == 2 and len(self._hits) >= 2 * BACK_WITHIN)
            killed = {
                f"killed, {number + 1}": await self._change(self._kill, replicas=2)
                for number in range(self._arguments.kills)
            }
            return {
                **killed,
                "added": await self._change(self._scale, replicas=3),
                "removed": await self._change(self._scale, replicas=2),
            }
        finally:
            stopped.set()
            await asyncio.gather(*clients)

    async def _change(self, change: Callable[[int], Awaitable[None]], replicas: int) -> dict[str, float]:
        begun = len(self._hits)
        await change(replicas)
        serving = len(self._hits)
        await self._until(lambda: len(self._hits) >= serving + 2 * BACK_WITHIN)
        failed = sum(hit is None for hit in self._hits[begun:])
        return {
            "failed": failed,
            "requests": len(self._hits) - begun,
            "before": _rate(self._hits[begun - BACK_WITHIN : begun]),
            "begun": _rate(self._hits[begun + BACK_WITHIN : begun + 2 * BACK_WITHIN]),
            "serving": _rate(self._hits[serving + BACK_WITHIN : serving + 2 * BACK_WITHIN]),
        }

    async def _kill(self, replicas: int) -> None:
        self._ray.replicas(self._router)[0].kill()
        await self._until(lambda: self._ray.running(self._router) < replicas)
        await self._until(lambda: self._ray.running(self._router) == replicas)

    async def _scale(self, replicas: int) -> None:
        self._ray.deploy(_document(self._router, replicas, self._arguments))
        await self._until(lambda: self._ray.running(self._router) == replicas)

    async def _until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + CHANGE_TIMEOUT_S
        while not holds():
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"a change did not come:\n{self._ray.log.read_text()[-2000:]}")
            await asyncio.sleep(0.2)

    async def _ask(self, number: int, stopped: asyncio.Event) -> None:
        model, draw = resolve_model(self._arguments.model), random.Random(number)
        url = f"{self._ray.url}/{self._router}/v1/chat/completions"
        async with httpx.AsyncClient(timeout=120) as client:
            while not stopped.is_set():
                prompt = draw.randrange(self._arguments.prompts)
                body = chat_body(MODEL, 8, "And then?", text_of(self._arguments.prompt_tokens, model, prompt))
                try:
                    answer = await stream_answer(client, url, body)
                    self._hits.append(answer.cached_tokens / answer.prompt_tokens)
                except (RequestFailed, httpx.HTTPError):
                    self._hits.append(None)
                    await asyncio.sleep(0.1)


def _rate(hits: list[float | None]) -> float:
    answered = [hit for hit in hits if hit is not None]
    return sum(answered) / max(1, len(answered))


def summary(results: dict[str, Any]) -> str:
    """Return all changes in a sentence."""
    rows = [
        f"{router}, {change}: {found['failed']} of {found['requests']} failed, "
        f"hit rate {found['before']:.2f}, {found['begun']:.2f} after it began, {found['serving']:.2f} once all serve"
        for router, changes in results.items()
        for change, found in changes.items()
    ]
    return f"{'; '.join(rows)}."


if __name__ == "__main__":
    main()
