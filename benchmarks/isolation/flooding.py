"""Tenants that share a replica while one of them floods it: what the others keep of their hit rate. Simulated.

The real scheduler and prefix cache over a cost model on a virtual clock, so it takes seconds and repeats exactly.
"Unprotected" runs the same requests under one tenant's name: plain LRU, no turns. Knows nothing of Ray or HTTP.
`python -m benchmarks flooding --json FILE`
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.common.report import spread, write
from benchmarks.common.virtual_clock import VirtualClock
from router.protocol.block_hash import PrefixScope, TokenArray
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.protocol import EngineRequest, SamplingParams
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.scheduling.scheduler import Scheduler
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings

SECRET = b"flooding benchmark"
FLOODER = "flooder"
VOCAB = 32000


@dataclass(frozen=True, slots=True)
class FloodWorkload:
    """Quiet tenants return to a few system prompts each; the flooder never sends the same token twice."""

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
    seed: int = 0

    def settings(self) -> EngineSettings:
        """Return the replica's settings."""
        return EngineSettings(num_blocks=self.num_blocks, max_num_seqs=self.max_num_seqs)

    def arrivals(self, *, flood: bool) -> list[tuple[float, str, TokenArray, int]]:
        """Return (time, tenant, prompt, answer tokens) in order; the quiet ones are the same with and without."""
        rows: list[tuple[float, str, TokenArray, int]] = []
        for number in range(self.quiet_tenants):
            rng = Random(f"{self.seed} {number}")
            systems = [_tokens(f"{self.seed} {number} {i}", self.system_tokens) for i in range(self.system_prompts)]
            now_s = rng.expovariate(self.quiet_requests_per_s)
            while now_s < self.duration_s:
                question = _tokens(f"{self.seed} {number} {now_s}", self.question_tokens)
                rows.append(
                    (now_s, f"tenant-{number}", np.concatenate([rng.choice(systems), question]), self.answer_tokens)
                )
                now_s += rng.expovariate(self.quiet_requests_per_s)
        if flood:
            rng = Random(f"{self.seed} flood")
            now_s = rng.expovariate(self.flood_requests_per_s)
            while now_s < self.duration_s:
                prompt = _tokens(f"{self.seed} flood {now_s}", self.flood_tokens)
                rows.append((now_s, FLOODER, prompt, self.flood_answer_tokens))
                now_s += rng.expovariate(self.flood_requests_per_s)
        return sorted(rows, key=lambda row: row[0])


@dataclass(slots=True)
class Tally:
    """What happened to one side's requests."""

    requests: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return rates and percentiles."""
        return {
            "requests": self.requests,
            "rejected": self.rejected,
            "hit_rate": self.cached_tokens / max(1, self.prompt_tokens),
            "queue_s": spread(self.queue_s) if self.queue_s else None,
            "ttft_s": spread(self.ttft_s) if self.ttft_s else None,
        }


def drive(
    workload: FloodWorkload, arrivals: Rows[tuple[float, str, TokenArray, int]], *, protected: bool = True
) -> dict[str, Tally]:
    """Run requests to their ends in virtual time; return a tally for the quiet tenants and one for the flooder."""
    clock = VirtualClock()
    settings = workload.settings()
    shares = {row[1]: 1.0 for row in arrivals} if protected else {}
    cache = PrefixCache(settings.num_blocks, settings.block_size, shares=shares, clock=clock)
    scheduler = Scheduler(settings, cache)
    cost = CostModel(prefill_tokens_per_s=workload.prefill_tokens_per_s, vocab_size=VOCAB)
    runner = SimulatedRunner(cost, sleep=clock.sleep)
    tallies = {"quiet": Tally(), "flooder": Tally()}
    coming = deque(enumerate(arrivals))
    sides: dict[str, Tally] = {}
    flooding = 0
    while coming or scheduler.waiting_count or scheduler.running_count:
        while coming and coming[0][1][0] <= clock():
            number, (arrival_s, tenant, prompt, answer_tokens) = coming.popleft()
            tally = tallies["flooder" if tenant == FLOODER else "quiet"]
            if tenant == FLOODER and flooding >= workload.flood_waiting:
                tally.rejected += 1
                continue
            flooding += tenant == FLOODER
            scope = PrefixScope("simulated", salt=tenant.encode())
            root = scope.root(SECRET)
            request = EngineRequest(
                str(number),
                prompt,
                scope,
                root,
                SamplingParams(answer_tokens),
                tenant=tenant if protected else "everybody",
            )
            scheduler.add(SequenceState(request, lambda _: None, cache.chain(root, prompt), arrival_s))
            sides[request.request_id] = tally
        chosen = scheduler.schedule()
        if not chosen:
            clock.sleep(coming[0][1][0] - clock())
            continue
        for item in chosen:
            if item.admitted:
                tally = sides[item.sequence.request.request_id]
                flooding -= tally is tallies["flooder"]
                tally.requests += 1
                tally.prompt_tokens += item.sequence.prompt_tokens
                tally.cached_tokens += item.sequence.cached_tokens
                tally.queue_s.append(clock() - item.sequence.arrival_s)
        results = runner.execute([item.sequence.segment(item.tokens) for item in chosen])
        for item, result in zip(chosen, results, strict=True):
            scheduler.computed(item)
            if result.token is not None:
                if item.sequence.generated_tokens == 0:
                    sides[item.sequence.request.request_id].ttft_s.append(clock() - item.sequence.arrival_s)
                if item.sequence.append_token(result.token) is not None:
                    scheduler.remove(item.sequence.request.request_id)
        cache.take_events()
    return tallies


def measure_flooding(workload: FloodWorkload) -> dict[str, Any]:
    """Return the quiet tenants' figures without a flood, with it, and with it but unprotected, and their ratios."""
    alone = drive(workload, workload.arrivals(flood=False))["quiet"].to_json()
    flooded = drive(workload, workload.arrivals(flood=True))
    unprotected = drive(workload, workload.arrivals(flood=True), protected=False)["quiet"].to_json()
    quiet = flooded["quiet"].to_json()
    return {
        "engine": "simulated",
        "hit_rate_ratio": quiet["hit_rate"] / alone["hit_rate"],
        "unprotected_hit_rate_ratio": unprotected["hit_rate"] / alone["hit_rate"],
        "alone": alone,
        "flooded": quiet,
        "unprotected": unprotected,
        "flooder": flooded["flooder"].to_json(),
    }


def _tokens(seed: str, count: int) -> TokenArray:
    rng = np.random.default_rng(list(seed.encode()))
    return rng.integers(0, VOCAB, count, dtype=np.int32)


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--duration-s", type=float, default=FloodWorkload.__dataclass_fields__["duration_s"].default)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    workload = FloodWorkload(duration_s=arguments.duration_s, seed=arguments.seed)
    write(arguments.json, asdict(workload), measure_flooding(workload))


if __name__ == "__main__":
    main()
