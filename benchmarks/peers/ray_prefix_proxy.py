"""The rule and the prefix tree of Ray's PrefixCacheAffinityRouter as a proxy: `... PORT URL URL` on loopback.

Ray runs them inside Serve LLM, whose engine is vLLM; here they stand before any servers, as smg does.
"""

import asyncio
import random
import sys
import time
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

MATCH_RATE = 0.1
"""Ray's default. Its limit for unequal queues is infinite by default."""
MAX_BODY_BYTES = 64 << 20
_OWN = ("host", "content-length")
"""Headers that the proxy sets itself."""


class RayPrefixProxy:
    """Passes a request on to the server of ``urls`` that the rule names, and one without a prompt to the first."""

    def __init__(self, urls: list[str]) -> None:
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

        self._urls = urls
        self._running = dict.fromkeys(urls, 0)
        self._tree = PrefixTree()
        self._tree.add_tenants(urls, time.time())

    def application(self) -> web.Application:
        """Return the proxy, with all paths."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._with_client)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    def choose(self, text: str) -> str:
        """Return the server for a prompt, and remember it: the longest match, else the one with the least text."""
        matched, holders = self._tree.prefix_match(text, self._urls)
        if len(matched) < MATCH_RATE * len(text) or not holders:
            holders = self._tree.get_smallest_tenants() or self._urls
        chosen: str = min(random.sample(holders, len(holders)), key=self._running.__getitem__)
        self._tree.insert(text, chosen, time.time())
        return chosen

    async def _with_client(self, _: web.Application) -> Any:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as self._client:
            yield

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        url = self.choose(prompt_text(msgspec.json.decode(body))) if body else self._urls[0]
        kept = {name: value for name, value in request.headers.items() if name.lower() not in _OWN}
        self._running[url] += 1
        try:
            async with self._client.request(request.method, url + request.path_qs, data=body, headers=kept) as answer:
                response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response
        finally:
            self._running[url] -= 1


def prompt_text(body: dict[str, Any]) -> str:
    """Return what Ray compares of a request: the text of its messages or its prompt."""

    def text_of(value: Any) -> str:
        if isinstance(value, list):
            return "".join(map(text_of, value))
        if isinstance(value, dict):
            return text_of(value["text"] if isinstance(value.get("text"), str) else value.get("content"))
        return value if isinstance(value, str) else ""

    return text_of(body.get("messages") or body.get("prompt"))


def main() -> None:
    """Serve until SIGTERM."""
    port, *urls = sys.argv[1:]
    asyncio.set_event_loop(asyncio.new_event_loop())
    web.run_app(RayPrefixProxy(urls).application(), host="127.0.0.1", port=int(port), print=None)


if __name__ == "__main__":
    main()
