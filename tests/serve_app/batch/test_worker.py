"""Runners of batches: kills lose and repeat nothing, another one continues, and a busy server is asked again."""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from serve_app.batch.worker import BatchWorker, Said
from tests.serve_app.batch.kills import LINES, TENANTS, ended, judged, opened, submitted

KILLS = 40


def test_killed_runners_lose_and_repeat_no_line(tmp_path: Path) -> None:
    """Two runners of one database, as two ingresses have, die at random moments. docs: batch"""
    command = [sys.executable, "-m", "tests.serve_app.batch.kills", str(tmp_path / "f"), str(KILLS)]
    counts = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=250).stdout)
    assert counts["kills"] >= KILLS and counts["results"] == counts["batches"] * LINES > 0
    assert [counts[name] for name in ("lost", "repeated", "wrong", "left", "unended")] == [0] * 5


def test_a_runner_that_stops_hands_over_and_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    """Each line is refused once with a time to wait, and one fails; a batch waits for a tenant that is unknown now."""
    file, asked, known, some = tmp_path / "f", Counter[str](), {TENANTS[0]}, asyncio.Event()

    async def ask(tenant: str, path: str, body: bytes, request_id: str) -> Said:
        prompt = json.loads(body)["prompt"]
        asked[prompt] += 1
        if len(asked) > LINES // 4:
            some.set()
        if asked[prompt] == 1:
            return Said(429, b"{}", retry_after_s=0.001)
        if asked[prompt] == 2 and prompt.endswith("100"):
            return Said(500, b"{}")
        await asyncio.sleep(0.002)
        status = 400 if prompt.endswith("7") else 200
        return Said(status, json.dumps({"prompt": prompt}).encode())

    def runner(name: str) -> BatchWorker:
        batches = opened(file, None)
        return BatchWorker(batches, name, ask, known.__contains__, lambda *_: True, lambda: 16, lambda: 2)

    async def run() -> Counter[str]:
        made = await submitted(file, None)
        first, second = runner("first"), runner("second")
        first.start()
        await asyncio.wait_for(some.wait(), 60)
        await first.stop()
        second.start()
        known.add(TENANTS[1])
        second.wake()
        deadline_s = time.monotonic() + 60
        while not await ended(file, None):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.05)
        await second.stop()
        counts = Counter[str]()
        await judged(file, None, made, counts)
        return counts

    counts = asyncio.run(run())
    assert counts == Counter(results=LINES * len(TENANTS))
    assert len(asked) == LINES * len(TENANTS)
    assert sum(number > 3 for number in asked.values()) == 0
