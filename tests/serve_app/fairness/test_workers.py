"""Threads in turns of tenants: one tenant's long work leaves a thread to the others."""

import asyncio
import threading

import pytest

from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares


@pytest.mark.anyio
async def test_a_tenant_with_much_to_do_leaves_a_thread() -> None:
    """All jobs of one tenant hang; another's job ends at once. (docs: routing)"""
    release = threading.Event()
    workers = FairWorkers(Shares({"a": 1.0, "b": 1.0}), threads=2)
    jobs = [asyncio.create_task(workers.run("a", 1000, release.wait, 30)) for _ in range(6)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(workers.run("b", 10, lambda: 42), 20) == 42
    release.set()
    assert await asyncio.gather(*jobs) == [True] * 6


@pytest.mark.anyio
async def test_a_begun_job_keeps_its_thread_when_its_caller_leaves() -> None:
    """A job cancelled while it runs counts until it ends; a waiting one is never run; errors are passed on."""
    release, ran = threading.Event(), threading.Event()

    def fail() -> None:
        raise KeyError("x")

    workers = FairWorkers(Shares({}), threads=1)
    running = asyncio.create_task(workers.run("a", 1, release.wait, 30))
    waiting = asyncio.create_task(workers.run("a", 1, ran.set))
    last = asyncio.create_task(workers.run("a", 1, fail))
    await asyncio.sleep(0)
    running.cancel()
    waiting.cancel()
    await asyncio.wait([running, waiting])
    assert not last.done()
    release.set()
    with pytest.raises(KeyError):
        await last
    assert not ran.is_set()
