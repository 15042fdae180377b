"""The order of a file's requests that computes least: those whose prompts begin alike run together.

Equal beginnings are found in the text, piece by piece, so that no tokenizer is needed. In the order of the pieces'
chained digests all requests below one beginning are neighbours, at every length of it. So a cache with room for the
beginnings in progress computes each of them once. Knows nothing of engines, HTTP or storage.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import xxhash

PIECE_BYTES = 256
DIGEST_BYTES = 8
LEAST_SHARED = 4
"""Pieces: requests with a shorter common beginning are no group."""
LANES = 2
"""Groups in progress for each replica: while one's first request computes the beginning, another's others run."""

_encode = msgspec.json.Encoder(order="sorted").encode
_BEFORE = (
    "model", "lora_name", "cache_salt", "prompt_ref", "previous_response_id", "chat_template_kwargs",
    "reasoning_effort", "tools", "system", "instructions",
)  # fmt: skip
_AFTER = ("messages", "input", "prompt")


def beginnings(body: Mapping[str, Any]) -> bytes:
    """Return the packed digests of a request's pieces in the order of its prompt; each is over all before it."""
    head = [body.get(name) for name in _BEFORE]
    text = _encode([head, *(body[name] for name in _AFTER if name in body)])
    chain = bytearray()
    last = b""
    for at in range(0, len(text) - PIECE_BYTES + 1, PIECE_BYTES):
        last = xxhash.xxh3_64_digest(last + text[at : at + PIECE_BYTES])
        chain += last
    return bytes(chain)


@dataclass(slots=True)
class Group:
    """Requests by number. ``shared``: the first one computes a beginning that the others then reuse."""

    numbers: deque[int]
    shared: bool
    begun: bool = False
    """Whether the others may run."""
    running: int = 0


def grouped(chains: Sequence[bytes], most: int = 64) -> list[Group]:
    """Return all requests in the order that computes least, in groups of at most ``most``."""
    numbers = sorted(range(len(chains)), key=chains.__getitem__)
    joins = [_alike(chains[one], chains[other]) for one, other in pairwise(numbers)]
    groups: list[Group] = []
    for at, number in enumerate(numbers):
        with_last = at > 0 and joins[at - 1]
        shared = with_last or (at < len(joins) and joins[at])
        last = groups[-1] if groups else None
        if last is None or len(last.numbers) >= most or last.shared != shared or (shared and not with_last):
            groups.append(last := Group(deque(), shared))
        last.numbers.append(number)
    return groups


def as_given(count: int) -> list[Group]:
    """Return the requests in their own order."""
    return [Group(deque(range(count)), shared=False)]


def _alike(one: bytes, other: bytes) -> bool:
    """Return whether half of the shorter request is a beginning of both."""
    pieces = min(len(one), len(other)) // DIGEST_BYTES
    same = max(LEAST_SHARED, (pieces + 1) // 2)
    return pieces >= same and one[: same * DIGEST_BYTES] == other[: same * DIGEST_BYTES]


@dataclass(slots=True)
class LineRunner:
    """Runs groups in their order, ``at_once()`` requests of ``lanes()`` groups at a time.

    ``work`` answers one request, and never fails; ``ready`` is awaited before it.
    """

    work: Callable[[int], Awaitable[None]]
    at_once: Callable[[], int]
    lanes: Callable[[], int]
    ready: Callable[[int], Awaitable[None]] | None = None
    _open: list[Group] = field(default_factory=list)

    async def run(self, groups: Sequence[Group]) -> None:
        """Run all requests. If this is cancelled, so are those in progress."""
        left, tasks = deque(groups), set[asyncio.Task[None]]()
        try:
            while True:
                group = self._next(left) if len(tasks) < self.at_once() else None
                if group is None and not tasks:
                    return
                if group is None:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in [task for task in tasks if task.done()]:
                        tasks.discard(task)
                        task.result()
                    continue
                number = group.numbers.popleft()
                group.running += 1  # before the wait: a group's first request is alone
                if self.ready is not None:
                    await self.ready(number)
                tasks.add(asyncio.create_task(self._one(group, number)))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _next(self, left: deque[Group]) -> Group | None:
        """Return the group whose next request starts, None if all wait for one in progress."""
        self._open = [group for group in self._open if group.numbers]
        while left and len(self._open) < self.lanes():
            self._open.append(left.popleft())
        able = [group for group in self._open if group.begun or not group.shared or not group.running]
        return min(able, key=lambda group: group.running, default=None)

    async def _one(self, group: Group, number: int) -> None:
        try:
            await self.work(number)
        finally:
            group.running -= 1
            group.begun = True
