"""What it costs to promise every answer its worst case, and what it costs not to. Simulated.

The real scheduler and prefix cache over a cost model on a virtual clock, so it takes seconds and repeats exactly.
"known lengths" promises what each answer will really need, which no rule can know. Knows nothing of Ray or HTTP.
`python -m benchmarks admission --json FILE`
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.common.report import spread, write
from benchmarks.common.virtual_clock import VirtualClock
from router.protocol.block_hash import PrefixScope
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.protocol import EngineRequest, SamplingParams
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.scheduling.scheduler import Scheduler
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import AdmissionRule, EngineSettings

SCOPE = PrefixScope("simulated")
ROOT = SCOPE.root(b"admission benchmark")
VOCAB = 32000


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """Chats whose prompts share nothing; answers end long before the ``max_tokens`` that their clients leave open."""

    requests: int = 1000
    requests_per_s: float = 20.0
    prompt_tokens: int = 400
    answer_tokens: int = 250
    longest_answer_tokens: int = 1000
    num_blocks: int = 2048
    max_num_seqs: int = 256
    prefill_tokens_per_s: float = 20_000.0
    seed: int = 0

    def chats(self) -> list[tuple[float, int, int]]:
        """Return (arrival, prompt tokens, answer tokens) in order."""
        rng, now_s, rows = Random(self.seed), 0.0, []
        for _ in range(self.requests):
            now_s += rng.expovariate(self.requests_per_s)
            prompt = max(1, round(rng.expovariate(1 / self.prompt_tokens)))
            answer = round(rng.expovariate(1 / self.answer_tokens))
            rows.append((now_s, min(prompt, 4000), min(max(1, answer), self.longest_answer_tokens)))
        return rows


def drive(workload: ChatWorkload, rule: AdmissionRule, max_tokens: int | None) -> dict[str, Any]:
    """Run the chats to their ends; ``max_tokens`` None: each names the length that its answer will have."""
    clock = VirtualClock()
    settings = EngineSettings(num_blocks=workload.num_blocks, max_num_seqs=workload.max_num_seqs, admission=rule)
    cache = PrefixCache(settings.num_blocks, settings.block_size, clock=clock)
    scheduler = Scheduler(settings, cache)
    cost = CostModel(prefill_tokens_per_s=workload.prefill_tokens_per_s, vocab_size=VOCAB)
    runner = SimulatedRunner(cost, sleep=clock.sleep)
    chats = workload.chats()
    coming = deque(enumerate(chats))
    ttft_s: list[float] = []
    whole_s: list[float] = []
    pauses_s: list[float] = []
    spoke_s: dict[str, float] = {}
    preemptions = recomputed = steps = running = 0
    while coming or scheduler.waiting_count or scheduler.running_count:
        while coming and coming[0][1][0] <= clock():
            number, (arrival_s, prompt, answer) = coming.popleft()
            ids = np.random.default_rng([workload.seed, number]).integers(0, VOCAB, prompt, dtype=np.int32)
            params = SamplingParams(answer if max_tokens is None else max_tokens)
            request = EngineRequest(str(number), ids, SCOPE, ROOT, params)
            scheduler.add(SequenceState(request, lambda _: None, cache.chain(ROOT, ids), arrival_s))
        chosen = scheduler.schedule()
        preemptions += len(list(scheduler.preempted))
        if not chosen:
            if coming and not scheduler.waiting_count:
                clock.sleep(coming[0][1][0] - clock())
            continue
        recomputed += sum(i.sequence.split_prefill(i.tokens)[1] for i in chosen if i.sequence.prefilling)
        steps, running = steps + 1, running + len(chosen)
        results = runner.execute([item.sequence.segment(item.tokens) for item in chosen])
        for item, result in zip(chosen, results, strict=True):
            sequence = item.sequence
            name = sequence.request.request_id
            scheduler.computed(item)
            if result.token is None:
                continue
            if sequence.generated_tokens == 0:
                ttft_s.append(clock() - sequence.arrival_s)
            else:
                pauses_s.append(clock() - spoke_s[name])
            spoke_s[name] = clock()
            if sequence.append_token(result.token) or sequence.generated_tokens >= chats[int(name)][2]:
                whole_s.append(clock() - sequence.arrival_s)
                scheduler.remove(name)
        cache.take_events()
    return {
        "output_tokens_per_s": sum(answer for _, _, answer in chats) / clock(),
        "running_mean": running / steps,
        "ttft_s": spread(ttft_s),
        "request_s": spread(whole_s),
        "between_tokens_s": spread(pauses_s),
        "preemptions": preemptions,
        "recomputed_tokens": recomputed,
    }


def measure_admission(workload: ChatWorkload) -> dict[str, Any]:
    """Return the figures of each rule by the ``max_tokens`` that clients leave open."""
    rules: tuple[AdmissionRule, ...] = ("worst_case", "optimistic")
    return {
        "engine": "simulated",
        "known lengths": drive(workload, "worst_case", None),
        **{f"{rule}, max_tokens {most}": drive(workload, rule, most) for rule in rules for most in (1024, 8192)},
    }


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rate", type=float, default=ChatWorkload.__dataclass_fields__["requests_per_s"].default)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    workload = ChatWorkload(requests_per_s=arguments.rate, seed=arguments.seed)
    write(arguments.json, asdict(workload), measure_admission(workload))


if __name__ == "__main__":
    main()
