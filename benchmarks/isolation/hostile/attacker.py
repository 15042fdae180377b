"""An attack in a process of its own, from this one's side: start, end, and what came of it.

Attackers are nice: on one machine they would otherwise take the processor from whom they attack, and from the clock.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any, Self

from benchmarks.isolation.hostile.attacks import ATTACKS, Attack
from benchmarks.isolation.hostile.raw_http import Reply, Target

READY_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0
_NICENESS = 5
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an attack. ``started_s``, ``ended_s``: by time.monotonic; nothing of it was open after the end."""

    started_s: float = 0.0
    ended_s: float = 0.0
    replies: list[Reply] = field(default_factory=list)
    notes: dict[str, float] = field(default_factory=dict)

    def statuses(self) -> dict[str, int]:
        """Return how many requests ended with each status."""
        found = sorted(reply.status for reply in self.replies)
        return {str(status): found.count(status) for status in dict.fromkeys(found)}


class Attacker:
    """``async with``: the attack is ready when the block begins, and over, with an ``outcome``, when it ends."""

    def __init__(self, name: str, target: Target, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._stop = context.Event()
        self._process = context.Process(target=_main, args=(name, target, options, self._stop, there), daemon=True)
        self._there = there
        self.outcome = Outcome()

    async def __aenter__(self) -> Self:
        self._process.start()
        self._there.close()
        await asyncio.to_thread(self._receive, READY_TIMEOUT_S)
        return self

    async def done(self, timeout_s: float) -> bool:
        """Wait until the attack ended by itself; False when it did not within ``timeout_s``."""
        return await asyncio.to_thread(self._here.poll, timeout_s)

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        try:
            self.outcome = await asyncio.to_thread(self._receive, END_TIMEOUT_S)
        finally:
            await asyncio.to_thread(self._process.join, 5.0)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            self._here.close()

    def _receive(self, timeout_s: float) -> Outcome:
        if not self._here.poll(timeout_s):
            raise RuntimeError(f"the attacker's process {self._process.pid} said nothing for {timeout_s:.0f} s")
        try:
            received = self._here.recv()
        except EOFError:
            raise RuntimeError("the attacker's process ended with an error; see above") from None
        assert isinstance(received, Outcome)
        return received


def _main(name: str, target: Target, options: dict[str, Any], stop: Event, out: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    with suppress(BrokenPipeError):
        out.send(asyncio.run(_attack(name, target, options, stop, out)))


async def _attack(name: str, target: Target, options: dict[str, Any], stop: Event, out: Connection) -> Outcome:
    started_s = time.monotonic()

    def ready() -> None:
        nonlocal started_s
        started_s = time.monotonic()
        out.send(Outcome())

    attack = Attack(target, ready)
    task = asyncio.ensure_future(ATTACKS[name](attack, **options))
    while not task.done() and not stop.is_set():
        await asyncio.wait({task}, timeout=_POLL_S)
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    # Streams that were aborted close in the loop's next turn.
    await asyncio.sleep(0)
    return Outcome(started_s, time.monotonic(), attack.replies, attack.notes)
