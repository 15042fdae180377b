"""What attackers do, each in a process of its own. Knows HTTP and the clock; knows nothing of what is watched.

An attack prepares what it sends, says that it is ready, and goes on until it is cancelled, or ends by itself.
"""

from __future__ import annotations

import asyncio
import random
import resource
import select
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import cycle

from benchmarks.isolation.hostile.bodies import KINDS, short_prompts
from benchmarks.isolation.hostile.raw_http import (
    CHAT,
    COMPLETIONS,
    Connection,
    Reply,
    Target,
    post,
    post_json,
)

LONG_PROMPT = "long@1"
"""The public prompt of 1 MiB."""
TIMEOUT_S = 60.0
RECONNECT_S = 0.05
REOPENED_PER_S = 200
_SPARE_FILES = 200
_PATIENCE_S = (0.03, 0.1, 0.3, 1.0, 4.0)


@dataclass(slots=True)
class Attack:
    """One attack under way: where to, what came of its requests, and other figures of it."""

    target: Target
    ready: Callable[[], None]
    replies: list[Reply] = field(default_factory=list)
    notes: dict[str, float] = field(default_factory=dict)


async def retry_storm(
    attack: Attack, *, connections: int = 12, prompts: int = 128, max_tokens: int = 16, polite: bool = False
) -> None:
    """Send many short prompts at once and again: at once, or ``polite``, when the server said."""
    requests = [post(attack.target, COMPLETIONS, short_prompts(prompts, max_tokens, number)) for number in range(64)]
    attack.ready()

    async def one(first: int) -> None:
        connection = Connection(attack.target)
        try:
            while True:
                first = (first + 1) % len(requests)
                reply = await connection.exchange(requests[first], TIMEOUT_S)
                attack.replies.append(reply)
                if polite and reply.status != 200:
                    await asyncio.sleep(max(1.0, reply.retry_after_s))
                elif reply.status == 0:
                    await asyncio.sleep(RECONNECT_S)
        finally:
            connection.abort()

    await asyncio.gather(*(one(number * 5) for number in range(connections)))


async def big_bodies(attack: Attack, *, kind: str, parallel: int = 6, for_ever: bool = False) -> None:
    """Send so many bodies of 8 MB at once, and once each is answered end, or send others."""
    path, make = KINDS[kind]
    bodies = [make(number) for number in range(parallel)]
    attack.ready()

    async def one(body: bytes) -> None:
        connection = Connection(attack.target)
        number = 0
        try:
            while True:
                attack.replies.append(await connection.exchange(post(attack.target, path, body), TIMEOUT_S))
                if not for_ever:
                    return
                number += 1
                # What was seen once may be known: other texts begin otherwise.
                body = body.replace(b"%08d " % (number - 1), b"%08d " % number, 1) if kind == "long_text" else body
                await asyncio.sleep(RECONNECT_S)
        finally:
            connection.abort()

    await asyncio.gather(*map(one, bodies))


async def long_references(attack: Attack, *, connections: int = 2, prompts: int = 128) -> None:
    """Name the public prompt of 1 MiB before many prompts: a few KB that stand for 128 MiB of text."""
    bodies = [short_prompts(prompts, 1, number, LONG_PROMPT) for number in range(16)]
    requests = [post(attack.target, COMPLETIONS, body) for body in bodies]
    attack.ready()

    async def one(first: int) -> None:
        connection = Connection(attack.target)
        try:
            while True:
                first = (first + 1) % len(requests)
                attack.replies.append(await connection.exchange(requests[first], TIMEOUT_S))
                await asyncio.sleep(RECONNECT_S)
        finally:
            connection.abort()

    await asyncio.gather(*(one(number * 5) for number in range(connections)))


async def half_open(attack: Attack, *, connections: int = 10_000, source: str = "") -> None:
    """Hold so many connections with half a request each; one that the server closes is opened again, in time.

    Fewer where this process may not have so many files; ``notes`` tell how many.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(connections, hard - _SPARE_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted + _SPARE_FILES, hard))
    half = post(attack.target, COMPLETIONS, b"x" * 64)[:60]
    attack.notes |= {"wanted": wanted, "sent_half": 0, "closed_by_server": 0, "held": 0}
    held: dict[int, socket.socket] = {}
    attack.ready()
    with select.epoll() as poller:
        try:
            may_open = float(wanted)
            while True:
                while len(held) < wanted and may_open >= 1:
                    made = _begin(attack.target, source or attack.target.source)
                    may_open -= 1
                    if made is not None:
                        held[made.fileno()] = made
                        poller.register(made, select.EPOLLOUT | select.EPOLLIN | select.EPOLLRDHUP)
                for descriptor, events in poller.poll(0):
                    try:
                        if events & (select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLERR | select.EPOLLHUP):
                            raise ConnectionResetError
                        held[descriptor].send(half)
                        poller.modify(descriptor, select.EPOLLIN | select.EPOLLRDHUP)
                        attack.notes["sent_half"] += 1
                    except OSError:
                        held.pop(descriptor).close()
                        attack.notes["closed_by_server"] += 1
                attack.notes["held"] = len(held)
                await asyncio.sleep(0.05)
                may_open = min(may_open + 0.05 * REOPENED_PER_S, wanted)
        finally:
            for open_one in held.values():
                open_one.close()


async def leavers(
    attack: Attack, *, clients: int = 1000, burst: int = 100, seed: int = 0, for_ever: bool = False
) -> None:
    """Ask for long answers in bursts, streamed or whole, one or many, and leave each at a random moment.

    Moments lie in the line, before the first token, and in mid-stream; of every other burst most are one and the same.
    """
    generator = random.Random(seed)
    requests = [_long_request(attack.target, generator, f"{seed} {number}") for number in range(clients)]
    attack.ready()

    async def one(request: bytes, after_s: float) -> None:
        try:
            _, writer = await attack.target.connect()
        except OSError:
            attack.notes["not_connected"] = attack.notes.get("not_connected", 0) + 1
            return
        try:
            writer.write(request)
            await asyncio.sleep(after_s)
        finally:
            writer.transport.abort()

    firsts = range(0, clients, burst)
    for first in cycle(firsts) if for_ever else firsts:
        leaving = requests[first : first + burst]
        moments = [generator.choice(_PATIENCE_S) * generator.random() for _ in leaving]
        if first // burst % 2:
            moments = [generator.choice((moments[0], moments[0], moment)) for moment in moments]
        await asyncio.gather(*map(one, leaving, moments))
        attack.notes["left"] = attack.notes.get("left", 0) + len(leaving)


def _long_request(target: Target, generator: random.Random, text: str) -> bytes:
    """Return a request that would run for minutes; some ask for many choices or prompts."""
    common = {"model": "demo", "max_tokens": 4000, "ignore_eos": True, "stream": generator.random() < 0.7}
    kind = generator.random()
    if kind < 0.85:
        messages = [{"role": "user", "content": f"{text} {'word ' * generator.choice((5, 50, 500))}"}]
        return post_json(target, CHAT, {**common, "messages": messages, "n": 1 if kind < 0.7 else 16})
    prompts = [f"{text} {part}" for part in range(generator.choice((8, 128)))]
    return post_json(target, COMPLETIONS, {**common, "prompt": prompts})


def _begin(target: Target, source: str) -> socket.socket | None:
    """Return a socket that connects by itself; None when the system has no more."""
    made = socket.socket()
    try:
        made.setblocking(False)
        made.bind((source, 0))
        made.connect_ex((target.host, target.port))
    except OSError:
        made.close()
        return None
    return made


ATTACKS: dict[str, Callable[..., Awaitable[None]]] = {
    "retry_storm": retry_storm,
    "big_bodies": big_bodies,
    "long_references": long_references,
    "half_open": half_open,
    "leavers": leavers,
}
