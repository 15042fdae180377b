"""The most tokens a second of one ingress: until the 99th percentile of the time between tokens, in steps, doubles.

Ever more streams of simulated engines, whose steps take 20 ms and half a millisecond for each answer; replicas,
ingress, HAProxy and the client share the machine. Tokens that wait leave in one event, so a stream that falls behind
has longer times between events.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.common.harness import Findings, Options, benchmark, flag, note
from benchmarks.common.report import BenchmarkError, percentile
from benchmarks.common.server import instance
from serve_app.config.engine import SIMULATED_DECODE_EACH_S
from serve_app.replay.client import chat_body

STEP_S = 0.02
SETTLED_S = 1.0
"""Of each stream, left out at its beginning."""


class _Stream(asyncio.Protocol):
    """One request, and the times at which events of its answer came; as little work as can be for each."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.times: list[float] = []
        self.status = self._last = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._clock = asyncio.get_running_loop().time

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.status, self._last = self.status or data[:12], (self._last + data)[-200:]
        if b"[DONE]" not in self._last:
            self.times.append(self._clock())
        elif not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(BenchmarkError(f"a stream broke off: {self.status!r} ... {self._last!r}"))

    def gaps(self) -> Iterator[float]:
        """Yield the times between events, without the stream's beginning."""
        for before, after in zip(self.times, self.times[1:], strict=False):
            if before - self.times[0] > SETTLED_S:
                yield after - before


async def _stage(url: str, model: str, streams: int, tokens: int, number: int) -> dict[str, float]:
    """Return tokens a second and the times between events of so many streams."""
    address, loop, begun = urlsplit(url), asyncio.get_running_loop(), list[_Stream]()
    for place in range(streams):
        body = json.dumps(
            {**chat_body(model, tokens, f"stage {number}, stream {place}", None), "ignore_eos": True, "stream": True}
        )
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        request = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        stream = _Stream(request)
        await loop.create_connection(lambda made=stream: made, str(address.hostname), address.port or 80)  # type: ignore[misc]
        begun.append(stream)
        await asyncio.sleep(SETTLED_S / streams)
    await asyncio.gather(*(stream.ended for stream in begun))
    gaps = sorted(gap for stream in begun for gap in stream.gaps())
    rate = sum(tokens / (stream.times[-1] - stream.times[0]) for stream in begun)
    times_ms = {f"p{part}_ms": 1000 * percentile(gaps, part) for part in (50, 99)}
    return {"streams": streams, "tokens_per_s": rate, **times_ms}


def _holds(stage: dict[str, float], first: dict[str, float]) -> bool:
    return stage["p99_steps"] <= 2 * first["p99_steps"]


@benchmark(
    __doc__,
    flag("replicas", 6),
    flag("first", 32, "streams at first; the next stages have half as many more each"),
    flag("most", 500, "streams at most: the connections of one address are bounded"),
    flag("tokens", 250, "of each answer"),
    flag("runs", 5),
    model="demo",
)
def run(options: Options) -> Findings:
    """Measure stages until the time between tokens doubles, in each run."""
    flags = ["--model", options.model, "--engine", "simulated", "--replicas", str(options.replicas)]
    flags += ["--set", f"simulated_decode_step_s={STEP_S}", "--set", "simulated_prefill_tokens_per_s=1000000"]
    for bound in ("max_num_seqs=1024", "max_queued_requests=4096", "max_waiting_requests=4096"):
        flags += ["--set", bound]
    runs: list[list[dict[str, float]]] = []
    with ExitStack() as stack:
        url = stack.enter_context(instance(*flags))
        for number in range(options.runs):
            stages: list[dict[str, float]] = []
            streams = options.first
            while not stages or _holds(stages[-1], stages[0]):
                step_ms = 1000 * (STEP_S + streams / options.replicas * SIMULATED_DECODE_EACH_S)
                stage = uvloop.run(_stage(url, options.model, streams, options.tokens, number))
                stages.append({**stage, "step_ms": step_ms, "p99_steps": stage["p99_ms"] / step_ms})
                note("{streams} streams: {tokens_per_s:,.0f} tokens/s, p99 {p99_steps:.1f} steps".format(**stages[-1]))
                if streams == options.most:
                    break
                streams = min(streams + streams // 2, options.most)
            runs.append(stages)
    most = sorted(max(stage["tokens_per_s"] for stage in stages if _holds(stage, stages[0])) for stages in runs)
    summary = (
        f"The most tokens a second of one ingress, on a machine shared with {options.replicas} simulated replicas and "
        f"the client: {percentile(most, 50):,.0f} ({most[0]:,.0f} to {most[-1]:,.0f})."
    )
    return Findings({"runs": runs, "most_tokens_per_s": most}, summary, more={"simulated": True})
