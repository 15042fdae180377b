"""Tenants share a replica while one of them floods it: the remaining hit rate of the others.

The engine is simulated, or it computes in real time with a smaller workload. "unprotected" runs the same requests
under one tenant's name: plain LRU, first come, first served.
"""

import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.common.harness import Findings, Options, benchmark, engine_flag, flag, progress
from benchmarks.common.output_collector import OutputCollector, running
from benchmarks.common.random_drafter import with_eagle_head
from benchmarks.common.report import percentile, spread
from benchmarks.common.virtual_clock import VirtualClock
from router.protocol.block_hash import PrefixScope, TokenArray
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.sources import resolve_model
from serve_app.config.app import AppConfig
from serve_app.config.engine import ENGINES
from serve_app.engine.protocol import Engine, EngineOutput, EngineRequest, SamplingParams
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.scheduling.scheduler import Scheduler
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings
from serve_app.replica.engine_factory import make_engine

SECRET = b"flooding benchmark"
FLOODER = "flooder"
LIVE: dict[str, Any] = {
    "quiet_tenants": 3, "system_prompts": 2, "system_tokens": 512, "question_tokens": 32, "answer_tokens": 8,
    "flood_requests_per_s": 20.0, "flood_tokens": 900, "flood_answer_tokens": 32, "flood_waiting": 24,
    "num_blocks": 256, "max_num_seqs": 8, "duration_s": 30.0,
}  # fmt: skip
"""The workload for a small model on a few cores, with blocks of 32 tokens."""


@dataclass(frozen=True, slots=True)
class FloodWorkload:
    """Quiet tenants reuse a few system prompts each; all the flooder's prompts are new."""

    quiet_tenants: int = 9
    system_prompts: int = 3
    system_tokens: int = 1024
    question_tokens: int = 64
    answer_tokens: int = 32
    quiet_requests_per_s: float = 0.5
    flood_requests_per_s: float = 8.0
    flood_tokens: int = 2000
    flood_answer_tokens: int = 256
    duration_s: float = 120.0
    num_blocks: int = 4096
    prefill_tokens_per_s: float = 10_000.0
    max_num_seqs: int = 64
    flood_waiting: int = 224
    vocab_size: int = 32000
    seed: int = 0

    def arrivals(self, *, flood: bool) -> list[tuple[float, str, TokenArray, int]]:
        """Return (time, tenant, prompt, answer tokens) in order of time."""
        rows: list[tuple[float, str, TokenArray, int]] = []
        for number in range(self.quiet_tenants):
            rng = Random(f"{self.seed} {number}")
            systems = [self._tokens(f"{number} {i}", self.system_tokens) for i in range(self.system_prompts)]
            for now_s in self._times(rng, self.quiet_requests_per_s):
                question = self._tokens(f"{number} {now_s}", self.question_tokens)
                prompt = np.concatenate([rng.choice(systems), question])
                rows.append((now_s, f"tenant-{number}", prompt, self.answer_tokens))
        for now_s in self._times(Random(f"{self.seed} flood"), self.flood_requests_per_s if flood else 0.0):
            prompt = self._tokens(f"flood {now_s}", self.flood_tokens)
            rows.append((now_s, FLOODER, prompt, self.flood_answer_tokens))
        return sorted(rows, key=lambda row: row[0])

    def _times(self, rng: Random, requests_per_s: float) -> Iterator[float]:
        now_s = 0.0
        while requests_per_s and (now_s := now_s + rng.expovariate(requests_per_s)) < self.duration_s:
            yield now_s

    def _tokens(self, name: str, count: int) -> TokenArray:
        rng = np.random.default_rng(list(f"{self.seed} {name}".encode()))
        return rng.integers(0, self.vocab_size, count, dtype=np.int32)


@dataclass(slots=True)
class SideCounts:
    """Figures of one side's requests."""

    requests: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return rates and percentiles."""
        return {
            "requests": self.requests,
            "rejected": self.rejected,
            "hit_rate": self.cached_tokens / max(1, self.prompt_tokens),
            "queue_s": spread(self.queue_s) if self.queue_s else None,
            "ttft_s": spread(self.ttft_s) if self.ttft_s else None,
            "ttft_p95_s": percentile(self.ttft_s, 95) if self.ttft_s else None,
            "answer_s": spread(self.answer_s) if self.answer_s else None,
            "answer_p95_s": percentile(self.answer_s, 95) if self.answer_s else None,
        }


class Sides:
    """Counts the quiet tenants' requests and the flooder's; at most ``flood_waiting`` of the latter may wait."""

    def __init__(self, flood_waiting: int) -> None:
        self.quiet, self.flooder = SideCounts(), SideCounts()
        self._flood_waiting = flood_waiting
        self._waiting = 0

    def arrives(self, request: EngineRequest) -> bool:
        """Return whether a request is accepted."""
        if self.of(request) is self.flooder:
            if self._waiting >= self._flood_waiting:
                self.flooder.rejected += 1
                return False
            self._waiting += 1
        return True

    def starts(self, request: EngineRequest, cached_tokens: int, queue_s: float) -> None:
        """Count a started request, its time in the queue and its cached tokens."""
        counts = self.of(request)
        self._waiting -= counts is self.flooder
        counts.requests += 1
        counts.prompt_tokens += len(request.token_ids)
        counts.cached_tokens += cached_tokens
        counts.queue_s.append(queue_s)

    def of(self, request: EngineRequest) -> SideCounts:
        """Return the figures of a request's side."""
        return self.flooder if request.scope.salt == FLOODER.encode() else self.quiet


def drive(workload: FloodWorkload, *, flood: bool, protected: bool = True) -> Sides:
    """Run requests in virtual time on the real scheduler and prefix cache; not ``protected``: as one tenant."""
    arrivals = workload.arrivals(flood=flood)
    shares = {tenant: 1.0 for _, tenant, _, _ in arrivals} if protected else {}
    settings = EngineSettings(num_blocks=workload.num_blocks, max_num_seqs=workload.max_num_seqs)
    clock = VirtualClock()
    cache = PrefixCache(settings.num_blocks, settings.block_size, shares=shares, clock=clock)
    scheduler = Scheduler(settings, cache)
    cost = CostModel(prefill_tokens_per_s=workload.prefill_tokens_per_s, vocab_size=workload.vocab_size)
    runner = SimulatedRunner(cost, settings, sleep=clock.sleep)
    sides, coming = Sides(workload.flood_waiting), deque(enumerate(arrivals))
    while coming or scheduler.waiting or scheduler.running:
        while coming and coming[0][1][0] <= clock():
            number, (arrival_s, tenant, ids, answer_tokens) = coming.popleft()
            request = _request(str(number), tenant, ids, answer_tokens, protected=protected)
            if sides.arrives(request):
                chain = cache.prompt_chain(request.scope, request.root, ids)
                scheduler.add(SequenceState(request, lambda _: None, chain, arrival_s))
        # a real engine measures these
        chosen = scheduler.schedule(cost.prefill_tokens_per_s, cost.decode_base_s, cost.decode_per_sequence_s)
        if not chosen and not scheduler.preempted:
            assert coming, "the waiting requests can never start"
            clock.sleep(coming[0][1][0] - clock())
            continue
        for item in chosen:
            if item.admitted:
                sequence = item.sequence
                sides.starts(sequence.request, sequence.cached_tokens, clock() - sequence.arrival_s)
        segments = [item.sequence.segment(item.tokens) for item in chosen]
        runner.execute(segments)
        for item, segment in zip(chosen, segments, strict=True):
            scheduler.computed(item)
            if segment.token is not None:
                if item.sequence.generated_tokens == 0:
                    sides.of(item.sequence.request).ttft_s.append(clock() - item.sequence.arrival_s)
                if item.sequence.append_token(segment.token):
                    sides.of(item.sequence.request).answer_s.append(clock() - item.sequence.arrival_s)
                    scheduler.remove(item.sequence)
        cache.take_events()
    return sides


def drive_live(engine: Engine, workload: FloodWorkload, *, flood: bool, protected: bool = True) -> Sides:
    """Run ``drive``'s requests in real time, with an engine that begins with an empty cache."""
    sides, collector, names = Sides(workload.flood_waiting), OutputCollector(), set[str]()

    def submit(request: EngineRequest, arrival_s: float) -> None:
        def sink(outputs: Sequence[EngineOutput]) -> None:
            for output in outputs:
                if output.first is not None:
                    sides.starts(request, output.first.cached_tokens, output.first.queue_s)
                    sides.of(request).ttft_s.append(time.monotonic() - arrival_s)
                if output.finish_reason is not None:
                    sides.of(request).answer_s.append(time.monotonic() - arrival_s)
            collector(outputs)

        if sides.arrives(request):
            names.add(request.request_id)
            engine.submit(request, sink)

    begin_s = time.monotonic()
    for number, (arrival_s, tenant, ids, answer_tokens) in enumerate(workload.arrivals(flood=flood)):
        time.sleep(max(0.0, begin_s + arrival_s - time.monotonic()))
        name = f"{flood} {protected} {number}"
        submit(_request(name, tenant, ids, answer_tokens, protected=protected), begin_s + arrival_s)
    collector.wait(names)
    while not engine.reset_prefix_cache():
        time.sleep(0.01)
    return sides


def measure_live(
    kind: str, model: Path, workload: FloodWorkload, drafting: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the figures of a workload with an engine that computes ``model``. ``drafting``: its speculative_config."""
    tenants = [f"tenant-{number}" for number in range(workload.quiet_tenants)] + [FLOODER, "everybody"]
    config = AppConfig(
        model=str(model),
        engine=kind,
        tenants=[{"name": name, "key_sha256": [f"{number:064x}"]} for number, name in enumerate(tenants)],
        dtype="float32",
        block_size=32,
        num_blocks=workload.num_blocks,
        max_model_len=2048,
        max_num_seqs=workload.max_num_seqs,
        max_num_batched_tokens=512,
        max_waiting_requests=4096,
        enforce_eager=True,
        speculative_config=drafting,
    )
    with running(make_engine(config, load_checkpoint_info(model), lambda _: None)) as engine:
        return measured(kind, partial(drive_live, engine, workload))


def measure_flooding(workload: FloodWorkload) -> dict[str, Any]:
    """Return the figures of a workload in virtual time."""
    return measured("simulated", partial(drive, workload))


def measured(engine: str, run: Callable[..., Sides]) -> dict[str, Any]:
    """Return the quiet tenants' figures without a flood, with it and unprotected, and their ratios."""
    cases = progress(((True, False), (False, True), (True, True)), "flooding")
    bare, calm, flooded = [run(flood=flood, protected=protected) for flood, protected in cases]
    alone, quiet, unprotected = (sides.quiet.to_json() for sides in (calm, flooded, bare))
    return {
        "engine": engine,
        "hit_rate_ratio": quiet["hit_rate"] / alone["hit_rate"],
        "unprotected_hit_rate_ratio": unprotected["hit_rate"] / alone["hit_rate"],
        "answer_p50_ratio": quiet["answer_s"]["p50"] / alone["answer_s"]["p50"],
        "answer_p95_ratio": quiet["answer_p95_s"] / alone["answer_p95_s"],
        "ttft_p95_ratio": quiet["ttft_p95_s"] / alone["ttft_p95_s"],
        "unprotected_ttft_p95_ratio": unprotected["ttft_p95_s"] / alone["ttft_p95_s"],
        "alone": alone,
        "flooded": quiet,
        "unprotected": unprotected,
        "flooder": flooded.flooder.to_json(),
    }


def _request(name: str, tenant: str, ids: TokenArray, answer_tokens: int, *, protected: bool) -> EngineRequest:
    scope = PrefixScope("flooding", salt=tenant.encode())
    owner = tenant if protected else "everybody"
    return EngineRequest(
        name,
        tenant=owner,
        token_ids=ids,
        scope=scope,
        root=scope.root(SECRET),
        sampling=SamplingParams(answer_tokens),
    )


@benchmark(
    __doc__,
    engine_flag("simulated", "prefixes"),
    flag("duration-s", None, "duration of the requests, in each of three cases", type=float),
    flag("seed", 0),
    flag("speculative-config", None, "vLLM's; EAGLE without a model gets a random head", type=json.loads),
    model="demo",
)
def run(options: Options) -> Findings:
    """Run the workload alone, beside the flood, and unprotected."""
    workload, live = FloodWorkload(seed=options.seed), not ENGINES[options.engine].simulated
    model = resolve_model(options.model) if live else Path()
    if live:
        workload = replace(workload, **LIVE, vocab_size=load_checkpoint_info(model).vocab_size)
    if options.duration_s:
        workload = replace(workload, duration_s=options.duration_s)
    with tempfile.TemporaryDirectory(prefix="warmpath-drafter-") as directory:
        drafting = with_eagle_head(options.speculative_config, model, Path(directory) / "head")
        results = measure_live(options.engine, model, workload, drafting) if live else measure_flooding(workload)
    return Findings(
        results,
        f"Beside a tenant that floods, the quiet ones keep {results['hit_rate_ratio']:.2f} of their hit rate, and "
        f"{results['unprotected_hit_rate_ratio']:.2f} without quotas and fair queue; their p95 to a first token is "
        f"{results['ttft_p95_ratio']:.1f} and {results['unprotected_ttft_p95_ratio']:.1f} times that alone, "
        f"and whole answers take {results['answer_p50_ratio']:.1f} times (median) and "
        f"{results['answer_p95_ratio']:.1f} times (p95) as long "
        f"({options.engine}{'' if live else ', in virtual time'}).",
        asdict(workload),
    )
