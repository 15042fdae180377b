"""Tenants that share a replica while one of them floods it: what the others keep of their hit rate. Simulated.

"unprotected" runs the same requests under one tenant's name: plain LRU, first come first served.
"""

from collections import deque
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import numpy as np

from benchmarks.common.report import parser_of, percentile, progress, spread, write
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
    """Quiet tenants return to a few system prompts each; the flooder's prompts are all new."""

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

    def arrivals(self, *, flood: bool) -> list[tuple[float, str, TokenArray, int]]:
        """Return (time, tenant, prompt, answer tokens) in order."""
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
class Counts:
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
            "answer_s_p95": percentile(self.answer_s, 95) if self.answer_s else None,
        }


class Sides:
    """Counts the quiet tenants' requests and the flooder's; of these at most ``flood_waiting`` wait."""

    def __init__(self, clock: VirtualClock, flood_waiting: int) -> None:
        self.quiet, self.flooder = Counts(), Counts()
        self._clock = clock
        self._flood_waiting = flood_waiting
        self._waiting = 0

    def arrives(self, request: EngineRequest) -> bool:
        """Return whether a request is taken."""
        if self._of(request) is self.flooder:
            if self._waiting >= self._flood_waiting:
                self.flooder.rejected += 1
                return False
            self._waiting += 1
        return True

    def starts(self, sequence: SequenceState) -> None:
        """Count a started request, its time in the queue and its cached tokens."""
        counts = self._of(sequence.request)
        self._waiting -= counts is self.flooder
        counts.requests += 1
        counts.prompt_tokens += sequence.prompt_tokens
        counts.cached_tokens += sequence.cached_tokens
        counts.queue_s.append(self._clock() - sequence.arrival_s)

    def first_token(self, sequence: SequenceState) -> None:
        """Time it."""
        self._of(sequence.request).ttft_s.append(self._clock() - sequence.arrival_s)

    def answered(self, sequence: SequenceState) -> None:
        """Time its whole answer."""
        self._of(sequence.request).answer_s.append(self._clock() - sequence.arrival_s)

    def _of(self, request: EngineRequest) -> Counts:
        return self.flooder if request.scope.salt == FLOODER.encode() else self.quiet


def drive(workload: FloodWorkload, *, flood: bool, protected: bool = True) -> Sides:
    """Run requests in virtual time over the real scheduler and prefix cache; not ``protected``: as one tenant."""
    arrivals = workload.arrivals(flood=flood)
    shares = {tenant: 1.0 for _, tenant, _, _ in arrivals} if protected else {}
    settings = EngineSettings(num_blocks=workload.num_blocks, max_num_seqs=workload.max_num_seqs)
    clock = VirtualClock()
    cache = PrefixCache(settings.num_blocks, settings.block_size, shares=shares, clock=clock)
    scheduler = Scheduler(settings, cache)
    cost = CostModel(prefill_tokens_per_s=workload.prefill_tokens_per_s, vocab_size=VOCAB)
    runner = SimulatedRunner(cost, sleep=clock.sleep)
    decode_step_s = cost.step_s(0, 1)  # an engine knows it from its warm-up
    sides, coming = Sides(clock, workload.flood_waiting), deque(enumerate(arrivals))
    while coming or scheduler.waiting or scheduler.running:
        while coming and coming[0][1][0] <= clock():
            number, (arrival_s, tenant, ids, answer_tokens) = coming.popleft()
            scope = PrefixScope("simulated", salt=tenant.encode())
            sampling, name = SamplingParams(answer_tokens), tenant if protected else "everybody"
            request = EngineRequest(str(number), ids, scope, scope.root(SECRET), sampling, tenant=name)
            if sides.arrives(request):
                chain = cache.prompt_chain(scope, request.root, ids)
                scheduler.add(SequenceState(request, lambda _: None, chain, arrival_s))
        chosen = scheduler.schedule(cost.prefill_tokens_per_s, decode_step_s)
        if not chosen and not scheduler.preempted:
            assert coming, "what waits can never start"
            clock.sleep(coming[0][1][0] - clock())
            continue
        for item in chosen:
            if item.admitted:
                sides.starts(item.sequence)
        began_s, prefills = clock(), any(item.sequence.prefilling for item in chosen)
        results = runner.execute([item.sequence.segment(item.tokens) for item in chosen])
        decode_step_s = decode_step_s if prefills else clock() - began_s
        for item, result in zip(chosen, results, strict=True):
            scheduler.computed(item)
            if result.token is not None:
                if item.sequence.generated_tokens == 0:
                    sides.first_token(item.sequence)
                if item.sequence.append_tokens([result.token])[1]:
                    sides.answered(item.sequence)
                    scheduler.remove(item.sequence)
        cache.take_events()
    return sides


def measure_flooding(workload: FloodWorkload) -> dict[str, Any]:
    """Return the quiet tenants' figures without a flood, with it, and unprotected, and their ratios."""
    cases = progress(((False, True), (True, True), (True, False)), "flooding")
    calm, flooded, bare = [drive(workload, flood=flood, protected=protected) for flood, protected in cases]
    alone, quiet, unprotected = (sides.quiet.to_json() for sides in (calm, flooded, bare))
    return {
        "engine": "simulated",
        "hit_rate_ratio": quiet["hit_rate"] / alone["hit_rate"],
        "unprotected_hit_rate_ratio": unprotected["hit_rate"] / alone["hit_rate"],
        "answer_p95_ratio": quiet["answer_s_p95"] / alone["answer_s_p95"],
        "alone": alone,
        "flooded": quiet,
        "unprotected": unprotected,
        "flooder": flooded.flooder.to_json(),
    }


def _tokens(seed: str, count: int) -> TokenArray:
    rng = np.random.default_rng(list(seed.encode()))
    return rng.integers(0, VOCAB, count, dtype=np.int32)


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--duration-s", type=float, default=FloodWorkload.__dataclass_fields__["duration_s"].default)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    workload = FloodWorkload(duration_s=arguments.duration_s, seed=arguments.seed)
    found = measure_flooding(workload)
    said = (
        f"Beside a tenant that floods, the quiet ones keep {found['hit_rate_ratio']:.2f} of their hit rate, and "
        f"{found['unprotected_hit_rate_ratio']:.2f} without quotas and fair queue. The p95 of their whole "
        f"answers is {found['answer_p95_ratio']:.2f} times that without a flood (simulated, in virtual time)."
    )
    write(arguments.json, asdict(workload), found, said)


if __name__ == "__main__":
    main()
