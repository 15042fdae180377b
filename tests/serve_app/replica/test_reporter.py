"""Routers learn a replica's load at once when prefills change, and no more often than necessary."""

import asyncio
from typing import Any
from unittest.mock import MagicMock

import pytest
from msgspec import structs

from router.background import run_in_background
from router.protocol.events import LoadReport, StatsReport
from serve_app.replica.reporter import Reporter

pytestmark = pytest.mark.anyio

IDLE = LoadReport(0, 0, 0, 8, 16, 100.0)


class Bench:
    """A reporter over an engine with a load set by the test; ``loads``: the reported ones."""

    def __init__(self, interval_s: float) -> None:
        self.load = IDLE
        self.loads: list[LoadReport] = []
        self.heard = asyncio.Event()
        feed = MagicMock()
        feed.put.side_effect = self._put
        self.reporter = Reporter(lambda: self.load, lambda: StatsReport(()), feed, interval_s)

    def _put(self, events: list[Any]) -> None:
        self.loads += [event for event in events if isinstance(event, LoadReport)]
        self.heard.set()

    async def next(self) -> LoadReport:
        self.heard.clear()
        await asyncio.wait_for(self.heard.wait(), 30)
        return self.loads[-1]


@pytest.mark.parametrize("news", [True, False])
async def test_a_prefill_that_changes_is_told_at_once(news: bool) -> None:
    """With an interval of an hour a report is sent when a prefill arrives or ends, and only then."""
    bench = Bench(3600.0)
    task = asyncio.create_task(bench.reporter.run())
    assert await bench.next() == IDLE
    for tokens in (500, 900):
        bench.load = structs.replace(IDLE, queued_prefill_tokens=tokens)
        if news:
            bench.reporter.prefills_changed()
            bench.reporter.prefills_changed()
            await bench.next()
        await asyncio.sleep(0.01)
    task.cancel()
    assert [load.queued_prefill_tokens for load in bench.loads] == ([0, 500, 900] if news else [0])


async def test_a_load_that_changes_otherwise_is_told_within_the_interval() -> None:
    """Decodes begin and end without a change of prefills; nothing is reported twice."""
    bench = Bench(0.01)
    task = asyncio.create_task(bench.reporter.run())
    await bench.next()
    bench.load = structs.replace(IDLE, running_sequences=3)
    assert (await bench.next()).running_sequences == 3
    await asyncio.sleep(0.05)
    task.cancel()
    assert len([load for load in bench.loads if load.running_sequences == 3]) == 1


async def test_reports_go_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers would take a replica for dead that no longer reports, and its health check would pass."""
    monkeypatch.setattr("router.background.PAUSE_S", 0.0)
    bench, failures = Bench(0.001), iter([True, True])

    def load() -> LoadReport:
        if next(failures, False):
            raise OSError("no load")
        return bench.load

    bench.reporter.load = load
    task = run_in_background(bench.reporter.run)
    assert await bench.next() == IDLE
    task.cancel()
