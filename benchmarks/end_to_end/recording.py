"""The cost of recording traffic: CPU time of the ingress for a short request and for a streamed token, on and off.

One instance with a simulated engine; ``traffic_log`` is switched on and off in it, in turns, as an operator does it.
Beside a noisy neighbour the two differ by more than recording costs: the same code also runs alone, in this process.
"""

import asyncio
import gc
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from msgspec import structs

from benchmarks.common.harness import Findings, Options, benchmark, flag, in_turns
from benchmarks.common.prompts import text_of
from benchmarks.common.report import BenchmarkError, percentile, spread
from cluster.local import LocalCluster, application
from router.protocol.block_hash import PrefixScope, hash_blocks
from router.protocol.request import Decision
from serve_app.api.request import ChatRequest
from serve_app.checkpoints.sources import resolve_model
from serve_app.config.traffic import TrafficLogConfig
from serve_app.engine.protocol import EngineRequest, FirstToken, SamplingParams
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.ingress.observe.answer_meter import AnswerMeter, Observers, RequestEnd
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.observe.traffic import TrafficObserver
from serve_app.replay.client import chat_body, stream_chat
from serve_app.traffic.recorder import Recording
from serve_app.traffic.recording_key import KeyOffer, RecordingKey

ARMS = ("off", "on")
BAR = 1.01
SYSTEM_TOKENS, QUESTION_TOKENS = 200, 50
APPLIED_S = 60.0
BLOCK_SIZE = 16
METERS = ("us_a_request", "us_a_token")


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process, to the nanosecond."""
    used = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            used += int((thread / "schedstat").read_text().split()[0])
    return used


class SwitchedServer:
    """The instance. ``pid``: of its ingress; ``file``: what is recorded now."""

    def __init__(self, cluster: LocalCluster, options: Options, folder: Path) -> None:
        self.url, self.file = cluster.url, folder
        self._cluster, self._folder = cluster, folder
        self._settings = {
            "model": options.model,
            "served_model_name": "served",
            "engine": "simulated",
            "replicas": options.replicas,
            "simulated_prefill_tokens_per_s": 1_000_000,
            "simulated_decode_step_s": 0.02,
        }
        cluster.deploy(application(self._settings))
        (ingress,) = cluster.processes("Ingress")
        self.pid = int(ingress["pid"])

    @property
    def lines(self) -> int:
        """The number of recorded requests."""
        return self.file.read_bytes().count(b'"input_length"') if self.file.is_file() else 0

    def use(self, arm: str) -> None:
        """Switch recording on or off, and wait until it is. Raises BenchmarkError."""
        name = f"{arm}-{uuid.uuid4().hex}"  # an alias shows that the settings are in force
        live: dict[str, Any] = {"aliases": {name: "served"}}
        self.file = self._folder / name
        if arm == "on":
            live["traffic_log"] = {"path": str(self.file)}
        both = {one: {"user_config": live} for one in ("Ingress", "Replica")}
        self._cluster.deploy(application(self._settings, both), wait_s=0)
        _wait(lambda: name in httpx.get(f"{self.url}/v1/models", timeout=30).text, "the settings are not in force")
        (ingress,) = self._cluster.processes("Ingress")
        if ingress["pid"] != self.pid:
            raise BenchmarkError("another ingress came; the runs cannot be compared")


def _wait(holds: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + APPLIED_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise BenchmarkError(otherwise)
        time.sleep(0.1)


@contextmanager
def served(options: Options) -> Iterator[SwitchedServer]:
    """Run the instance for the block."""
    with tempfile.TemporaryDirectory(prefix="warmpath-recording-") as folder, LocalCluster(1) as cluster:
        yield SwitchedServer(cluster, options, Path(folder))


async def cost(server: SwitchedServer, texts: Sequence[str], system: str, max_tokens: int, together: int) -> float:
    """Return the ingress' CPU in us for a request of one token, or for a token of longer ones."""
    free = asyncio.Semaphore(together)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=together)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:

        async def ask(text: str) -> int:
            async with free:
                body = {**chat_body("served", max_tokens, text, system), "ignore_eos": True}
                return (await stream_chat(client, server.url, body)).completion_tokens

        await ask(texts[0])
        before = cpu_ns(server.pid)
        tokens = sum(await asyncio.gather(*map(ask, texts)))
        await asyncio.sleep(1)  # the last lines are written
        used_us = (cpu_ns(server.pid) - before) / 1e3
    return used_us / (tokens if max_tokens > 1 else len(texts))


def measure(server: SwitchedServer, arm: str, options: Options, run: int) -> dict[str, float]:
    """Return the figures of one arm in one pair; both arms send the same prompts, which are warm."""
    model = resolve_model(options.model)
    system = text_of(SYSTEM_TOKENS, model, 1)
    texts = [text_of(QUESTION_TOKENS, model, 100 + number) for number in range(options.short_requests)]
    server.use(arm)
    request_us = asyncio.run(cost(server, texts, system, 1, 1))
    streams = texts[: 2 * options.clients]
    token_us = asyncio.run(cost(server, streams, system, options.max_tokens, options.clients))
    expected = len(texts) + len(streams) + 2 if arm == "on" else 0  # two to warm up
    if server.lines != expected:
        raise BenchmarkError(f"{server.lines} lines for {expected} requests")
    return dict(zip(METERS, (request_us, token_us), strict=True))


def median_within(values: Sequence[float]) -> tuple[float, float]:
    """Return between which values the median is in 95 of 100 repetitions of such runs (bootstrap)."""
    drawn = np.random.default_rng(0).choice(values, (2000, len(values)))
    least, most = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(least), float(most)


def alone_us(folder: Path, requests: int = 4000) -> float:
    """Return the CPU in us of recording a short request, with the writing thread's part."""
    observer = TrafficObserver()
    settings = TrafficLogConfig(path=folder / "alone.jsonl")
    recording = Recording(settings, settings.path, "alone", {"served": BLOCK_SIZE}, observer.counts)
    recording.use(RecordingKey(KeyOffer.new("alone")))
    observer.use(recording)
    observers, metrics = observer.observers("served"), IngressMetrics()
    decision = Decision("replica", "router", 1, 0, 0, "only_replica")
    request = ChatRequest(model="served", messages=(), max_tokens=1)
    ends = [RequestEnd("default", 0.0, 200, _answer(metrics, request, number), None) for number in range(requests)]
    gc.collect()
    gc.freeze()  # a server would not hold thousands of ended answers, nor look through them
    before_s = time.process_time()
    for end in ends:
        assert end.answer is not None
        sent = structs.replace(end.answer.generations[0], request_id=f"{end.answer.generations[0].request_id}.0")
        for delivered in observers.delivered:
            delivered(sent, decision, FirstToken(0), 0.01)
        for finished in observers.finished:
            finished(end._replace(arrived_s=time.perf_counter()))
    recording.stop()
    recording.join(APPLIED_S)
    used_s = time.process_time() - before_s
    gc.unfreeze()
    if observer.counts.written != requests:
        raise BenchmarkError(f"{observer.counts.written} of {requests} lines were written")
    return 1e6 * used_s / requests


def _answer(metrics: IngressMetrics, request: ChatRequest, number: int) -> AnswerMeter:
    tokens = SYSTEM_TOKENS + QUESTION_TOKENS
    hashes = hash_blocks(number.to_bytes(16), np.full(tokens, number, dtype=np.int32), BLOCK_SIZE)
    generation = EngineRequest(
        request_id=f"{number:032x}.0", token_ids=np.zeros(tokens, dtype=np.int32), block_hashes=hashes,
        scope=PrefixScope("served"), root=bytes(16), sampling=SamplingParams(max_tokens=1), charged=True,
    )  # fmt: skip
    no_limits = TenantLimits().begin("default")
    answer = AnswerMeter(Observers(), metrics, request, [generation], 0.0, 0, no_limits)
    answer.first_s[0], answer.last_s[0], answer.cached_tokens[0], answer.reasons[0] = 0.01, 0.02, 0, "length"
    return answer


@benchmark(
    __doc__,
    flag("runs", 15, "pairs"),
    flag("replicas", 1),
    flag("clients", 32, "concurrent streams"),
    flag("max-tokens", 128, "tokens of each streamed answer"),
    flag("short-requests", 200),
    model="demo",
)
def run(options: Options) -> Findings:
    """Measure both arms by turns, in one process."""
    with tempfile.TemporaryDirectory() as folder:
        alone = [alone_us(Path(folder)) for _ in range(options.runs)]
    with served(options) as server:
        measure(server, "on", options, 0)  # all prompts are warm, and so is the code
        rows = in_turns(ARMS, options.runs, lambda arm, number: measure(server, arm, options, number), alternate=True)
    results: dict[str, Any] = {"runs": rows, "alone_us": spread(alone)}
    told = []
    for name, unit, each in zip(METERS, ("request", "token"), (1, options.max_tokens), strict=True):
        off, on = ([row[name] for row in rows[arm]] for arm in ARMS)
        ratios = [with_ / without for without, with_ in zip(off, on, strict=True)]
        own = 1 + percentile(alone, 50) / each / percentile(off, 50)
        least, most = median_within(ratios)
        results[name] = {"off": spread(off), "on": spread(on), "on_over_off": spread(ratios), "by_alone": own}
        results[name]["median_within"] = [least, most]
        told.append(
            f"a {unit} costs {percentile(off, 50):.0f} us without and {percentile(on, 50):.0f} with, "
            f"{percentile(ratios, 50):.3f} times (median of pairs, 95 % between {least:.3f} and {most:.3f}), "
            f"{own:.4f} by what recording takes alone"
        )
    told.append(f"alone: {percentile(alone, 50):.0f} us a request ({min(alone):.0f} to {max(alone):.0f})")
    met = all(results[name]["by_alone"] <= BAR >= results[name]["median_within"][0] for name in METERS)
    return Findings(results, f"Simulated: {'; '.join(told)}; at most {BAR} is wanted: {'met' if met else 'missed'}.")
