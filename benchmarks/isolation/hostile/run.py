"""One hostile client of each kind in turn beside a neighbour and a probe, on a real server with its defaults.

`/health` is asked every 50 ms: its longest wait is how long the server stood still. The neighbour streams short chats,
one after the other; its times are compared with those alone, in the same run.
"""

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from benchmarks.common.harness import Findings, Options, benchmark, flag, names_flag, note
from benchmarks.common.report import percentile, spread
from benchmarks.common.server import instance, new_tenants
from benchmarks.isolation.hostile.attacks import ATTACKS, Victim, attack
from serve_app.replay.client import RequestFailed, chat_body, stream_answer

PROBE_S = 0.05
REST_S = 2.0
"""Between two kinds: what one has left to do is its own."""
ANSWER_TOKENS = 8
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Watched:
    """What the probe and the neighbour saw: seconds of each answer, and what failed."""

    health_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the figures."""
        chats = {"ttft_s": spread(self.ttft_s), "answer_s": spread(self.total_s)} if self.ttft_s else {}
        return {
            "worst_health_s": max(self.health_s, default=None), "probes": len(self.health_s), "chats": len(self.ttft_s),
            **chats, "failed": self.failed[:5],
        }  # fmt: skip


async def probe(url: str, seen: Watched) -> None:
    """Ask for the health at fixed moments; a late answer counts from when it was due."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client, asyncio.TaskGroup() as group:

        async def ask(due_s: float) -> None:
            try:
                status = (await client.get(f"{url}/health")).status_code
                if status != 200:
                    seen.failed.append(f"/health: {status}")
            except httpx.HTTPError as error:
                seen.failed.append(f"/health: {error!r}")
            seen.health_s.append(time.perf_counter() - due_s)

        due_s = time.perf_counter()
        while True:
            group.create_task(ask(time.perf_counter()))
            due_s = max(due_s + PROBE_S, time.perf_counter())
            await asyncio.sleep(due_s - time.perf_counter())


async def neighbour(url: str, key: str, model: str, seen: Watched) -> None:
    """Stream short chats, one after the other."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        number = 0
        while True:
            body = chat_body(model, ANSWER_TOKENS, f"{number}: what is due?", "Answer questions about contracts.")
            begun_s = time.perf_counter()
            try:
                answer = await stream_answer(client, f"{url}/v1/chat/completions", body, headers)
            except (RequestFailed, httpx.HTTPError) as error:
                seen.failed.append(str(error)[:200])
                await asyncio.sleep(PROBE_S)
            else:
                seen.ttft_s.append(answer.ttft_s)
                seen.total_s.append(time.perf_counter() - begun_s)
            number += 1


@asynccontextmanager
async def watching(url: str, key: str, model: str) -> AsyncIterator[Watched]:
    """Watch during the block; what is under way at its end counts."""
    seen = Watched()
    tasks = [asyncio.create_task(probe(url, seen)), asyncio.create_task(neighbour(url, key, model, seen))]
    try:
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def measure(target: Victim, key: str, model: str, kinds: list[str], seconds: float) -> dict[str, Any]:
    """Return the figures alone and beside each kind."""
    async with watching(target.url, key, model):
        await asyncio.sleep(REST_S)  # nothing is compiled or loaded later
    async with watching(target.url, key, model) as alone:
        await asyncio.sleep(max(20.0, seconds))
    note(row("alone", alone.to_json()))
    rows: dict[str, Any] = {}
    together = Watched()
    for kind in kinds:
        broken = ""
        async with watching(target.url, key, model) as seen:
            try:
                async with attack(kind, target) as statuses:
                    await asyncio.sleep(seconds)
            except RuntimeError as error:  # the other kinds still count
                broken, statuses = str(error), Counter()
        for name in ("health_s", "ttft_s", "total_s", "failed"):
            getattr(together, name).extend(getattr(seen, name))
        rows[kind] = {**seen.to_json(), **ratios(alone, seen), "statuses": dict(statuses), "broken": broken}
        note(row(kind, rows[kind]))
        await asyncio.sleep(REST_S)
    return {"alone": alone.to_json(), "beside": {**together.to_json(), **ratios(alone, together)}, "kinds": rows}


def row(name: str, figures: Mapping[str, Any]) -> str:
    """Return the figures beside one kind on a line, which is told as soon as it is known."""
    said = [f"/health {figures['worst_health_s'] or 0.0:.2f} s at most"]
    for key, of in (("ttft", "first token"), ("answer", "answer")):
        if spread_s := figures.get(f"{key}_s"):
            times = figures.get(f"{key}_p99_ratio")
            said.append(f"{of} p99 {spread_s['p99']:.2f} s" + (f" ({times:.2f}x)" if times else ""))
    said += [f"{count} x {status}" for status, count in sorted(figures.get("statuses", {}).items())]
    failed = [f"failed: {figures['failed'][0]}"] if figures["failed"] else []
    return f"{name}: {', '.join([*said, *failed, *filter(None, [figures.get('broken')])])}"


def ratios(alone: Watched, beside: Watched) -> dict[str, float | None]:
    """Return the neighbour's p99 beside a client to that alone."""

    def of(name: str) -> float | None:
        without, under = getattr(alone, name), getattr(beside, name)
        return percentile(under, 99) / percentile(without, 99) if without and under else None

    return {"ttft_p99_ratio": of("ttft_s"), "answer_p99_ratio": of("total_s")}


@contextlib.contextmanager
def stage(model: str, *, tenants: bool) -> Iterator[tuple[Victim, str]]:
    """Start a server; yield the hostile client's target and the neighbour's key. ``tenants``: two, each with a key."""
    settings: dict[str, Any] = {"model": model}
    keys: dict[str, str] = {}
    if tenants:
        keys, settings["tenants"] = new_tenants(["hostile", "neighbour"])
    with tempfile.TemporaryDirectory(prefix="warmpath-hostile-") as directory:
        config = Path(directory) / "settings.yaml"
        config.write_text(yaml.safe_dump(settings))
        config.chmod(0o600)
        with instance("--config", str(config), env={"XDG_STATE_HOME": directory}) as url:
            parts = urlsplit(url)
            assert parts.hostname is not None and parts.port is not None
            yield Victim(parts.hostname, parts.port, keys.get("hostile", "")), keys.get("neighbour", "")


def summary(results: Mapping[str, Any]) -> str:
    """Return the findings in sentences."""
    kinds, beside = results["kinds"], results["beside"]
    worst = max(kinds, key=lambda kind: kinds[kind]["worst_health_s"] or 0.0)
    slow = max(kinds, key=lambda kind: kinds[kind]["answer_p99_ratio"] or 0.0)
    return (
        f"Beside {len(kinds)} hostile clients /health takes at most {beside['worst_health_s']:.2f} s ({worst}; "
        f"alone {results['alone']['worst_health_s']:.2f} s), the neighbour's p99 is "
        f"{beside['answer_p99_ratio'] or 0.0:.2f} times that alone for a whole answer, "
        f"{beside['ttft_p99_ratio'] or 0.0:.2f} times to the first token (the slowest: {slow}, "
        f"{kinds[slow]['answer_p99_ratio'] or 0.0:.2f}); {len(beside['failed'])} of its requests and probes failed."
    )


@benchmark(
    __doc__,
    names_flag("kinds", ATTACKS, help_=",".join(ATTACKS)),
    flag("seconds", 100 / len(ATTACKS), "of each kind; all: 100"),
    flag("tenants", False, "each client has a key of its own; else there are none"),
    model="demo",
)
def run(options: Options) -> Findings:
    """Measure beside each kind."""
    with stage(options.model, tenants=options.tenants) as (target, key):
        results = asyncio.run(measure(target, key, options.model, options.kinds, options.seconds))
    return Findings(results, summary(results))
