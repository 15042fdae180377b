"""Attacks of a tenant, in a nice process: otherwise it would take the processor from the instance and the clock.

An attack prepares its requests, says that it is ready, and goes on until it is told to stop.
"""

import asyncio
import json
import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Event
from typing import Any

import httpx

from benchmarks.common.prompts import WORDS

MAX_BODY_BYTES = 8 * 1024 * 1024
"""The default of the setting ``max_body_bytes``."""
TIMEOUT_S = 60.0
RECONNECT_S = 0.05
_READY_S, _END_S, _NICENESS = 60.0, 30.0, 5
_PATIENCE_S = (0.03, 0.1, 0.3, 1.0, 4.0)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SOURCE = "127.0.0.2"
"""The attacker's address, another than the watched tenants'."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where an attack goes, and as whom."""

    host: str
    port: int
    api_key: str


Statuses = Counter[str]
"""Requests by status; 0: the connection was lost."""


async def retry_storm(target: Target, ready: Callable[[], None], statuses: Statuses) -> None:
    """12 connections send 128 short prompts each, again at once when refused or answered."""
    bodies = [_short_prompts(number) for number in range(64)]
    ready()
    lines = [bodies[number * 5 :] + bodies for number in range(12)]
    await asyncio.gather(*(_repeat(target, COMPLETIONS, line, statuses) for line in lines))


async def big_bodies(target: Target, ready: Callable[[], None], statuses: Statuses) -> None:
    """Six bodies of 8 MB at once, for ever: 280,000 messages of one letter, or one text."""
    bodies = [_tiny_messages(), _long_text(0), _long_text(1)] * 2
    ready()
    await asyncio.gather(*(_repeat(target, CHAT, [body], statuses, RECONNECT_S) for body in bodies))


async def leavers(target: Target, ready: Callable[[], None], statuses: Statuses) -> None:
    """Bursts of 100 ask for long answers, streamed or whole, one or many; each leaves at a random moment."""
    rng = random.Random(0)
    requests = [_long_request(target, rng, str(number)) for number in range(1000)]
    ready()

    async def leave(request: bytes, after_s: float) -> None:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(target.host, target.port, local_addr=(SOURCE, 0))
            try:
                writer.write(request)
                await asyncio.sleep(after_s)
            finally:
                writer.transport.abort()
            statuses["left"] += 1

    for first in cycle(range(0, len(requests), 100)):
        burst = requests[first : first + 100]
        await asyncio.gather(*(leave(request, rng.choice(_PATIENCE_S) * rng.random()) for request in burst))


ATTACKS: dict[str, Callable[[Target, Callable[[], None], Statuses], Awaitable[None]]] = {
    "retry_storm": retry_storm,
    "big_bodies": big_bodies,
    "leavers": leavers,
}


@asynccontextmanager
async def attack(name: str, target: Target) -> AsyncIterator[Statuses]:
    """Attack during the block, which fills the statuses. Raises RuntimeError when the attack breaks."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    stop = context.Event()
    process = context.Process(target=_main, args=(name, target, stop, there), daemon=True)
    process.start()
    there.close()

    def receive(timeout_s: float) -> Statuses:
        if not here.poll(timeout_s):
            raise RuntimeError(f"the attacker's process {process.pid} said nothing for {timeout_s:.0f} s")
        received: Statuses = here.recv()
        return received

    statuses = await asyncio.to_thread(receive, _READY_S)
    try:
        yield statuses
    finally:
        stop.set()
        statuses.update(await asyncio.to_thread(receive, _END_S))
        await asyncio.to_thread(process.join, 5.0)
        if process.is_alive():
            process.kill()
            process.join()
        here.close()


def _main(name: str, target: Target, stop: Event, out: Pipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    statuses: Statuses = Counter()

    async def run() -> None:
        task = asyncio.ensure_future(ATTACKS[name](target, lambda: out.send(Counter()), statuses))
        await asyncio.wait({task, asyncio.ensure_future(asyncio.to_thread(stop.wait))}, return_when="FIRST_COMPLETED")
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    asyncio.run(run())
    out.send(statuses)


async def _repeat(target: Target, path: str, bodies: list[bytes], statuses: Statuses, pause_s: float = 0.0) -> None:
    transport = httpx.AsyncHTTPTransport(local_address=SOURCE)
    headers = {"authorization": f"Bearer {target.api_key}", "content-type": "application/json"}
    url = f"http://{target.host}:{target.port}{path}"
    async with httpx.AsyncClient(transport=transport, headers=headers, timeout=TIMEOUT_S) as client:
        for body in cycle(bodies):
            try:
                status = (await client.post(url, content=body)).status_code
            except httpx.HTTPError:
                status = 0
            statuses[str(status)] += 1
            await asyncio.sleep(pause_s or (0.0 if status else RECONNECT_S))


def _short_prompts(number: int) -> bytes:
    rng = random.Random(number)
    texts = [f"{number} {index} {' '.join(rng.choices(WORDS, k=4))}" for index in range(128)]
    body = {"model": "demo", "prompt": texts, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return json.dumps(body).encode()


def _tiny_messages() -> bytes:
    head, item, tail = b'{"model":"demo","max_tokens":1,"messages":[', b'{"role":"user","content":"a"}', b"]}"
    count = (MAX_BODY_BYTES - len(head) - len(tail) + 1) // (len(item) + 1)
    return head + b",".join([item] * count) + tail


def _long_text(number: int) -> bytes:
    head = b'{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":"%08d ' % number
    paragraph = " ".join(random.Random(number).choices(WORDS, k=20_000)).encode()
    room = MAX_BODY_BYTES - len(head) - 4
    return head + (paragraph * (room // len(paragraph) + 1))[:room] + b'"}]}'


def _long_request(target: Target, rng: random.Random, text: str) -> bytes:
    """Return a request of minutes; some ask for many choices or prompts."""
    common: dict[str, Any] = {"model": "demo", "max_tokens": 4000, "ignore_eos": True, "stream": rng.random() < 0.7}
    kind = rng.random()
    if kind < 0.85:
        messages = [{"role": "user", "content": f"{text} {'word ' * rng.choice((5, 50, 500))}"}]
        return _posted(target, CHAT, {**common, "messages": messages, "n": 1 if kind < 0.7 else 16})
    prompts = [f"{text} {part}" for part in range(rng.choice((8, 128)))]
    return _posted(target, COMPLETIONS, {**common, "prompt": prompts})


def _posted(target: Target, path: str, body: dict[str, Any]) -> bytes:
    """Return a request as it goes over the wire."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nAuthorization: Bearer {target.api_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data
