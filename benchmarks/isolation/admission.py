"""What it costs to promise every answer its worst case, and what it costs not to. Simulated.

Chats on one replica (see ``virtual_replica``), by how many tokens they may generate. "known lengths" promises what each
answer will really need, which no rule can know.
`python -m benchmarks admission --json FILE`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import numpy as np

from benchmarks.common.report import parser_of, progress, spread, write
from benchmarks.common.virtual_clock import VirtualClock
from benchmarks.isolation.virtual_replica import VOCAB, TimedRequest, VirtualReplica
from router.protocol.block_hash import PrefixScope
from serve_app.engine.protocol import EngineRequest, SamplingParams
from serve_app.engine.scheduling.scheduler import Scheduled
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import AdmissionRule, EngineSettings

SCOPE = PrefixScope("simulated")
ROOT = SCOPE.root(b"admission benchmark")


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


@dataclass(slots=True)
class Seen:
    """What happened to the chats, on ``clock``."""

    clock: VirtualClock
    ttft_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    last_token_s: dict[str, float] = field(default_factory=dict)
    preemptions: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    running: int = 0

    def arrives(self, request: EngineRequest) -> bool:
        """Take every chat."""
        return True

    def scheduled(self, chosen: Sequence[Scheduled], preempted: int) -> None:
        """Count who runs and what is computed again."""
        self.preemptions += preempted
        self.steps += bool(chosen)
        self.running += len(chosen)
        self.recomputed_tokens += sum(i.sequence.split_prefill(i.tokens)[1] for i in chosen if i.sequence.prefilling)

    def token(self, sequence: SequenceState) -> None:
        """Time the first token, and the pause before every other one."""
        name, now_s = sequence.request.request_id, self.clock()
        if sequence.generated_tokens == 0:
            self.ttft_s.append(now_s - sequence.arrival_s)
        else:
            self.pauses_s.append(now_s - self.last_token_s[name])
        self.last_token_s[name] = now_s

    def ended(self, sequence: SequenceState) -> None:
        """Time the whole answer."""
        self.whole_s.append(self.clock() - sequence.arrival_s)


def drive(workload: ChatWorkload, rule: AdmissionRule, max_tokens: int | None) -> dict[str, Any]:
    """Run the chats to their ends; ``max_tokens`` None: each names the length that its answer will have."""
    settings = EngineSettings(num_blocks=workload.num_blocks, max_num_seqs=workload.max_num_seqs, admission=rule)
    replica = VirtualReplica(settings, workload.prefill_tokens_per_s)
    chats = workload.chats()

    def requests() -> Iterator[TimedRequest]:
        for number, (arrival_s, prompt_tokens, answer_tokens) in enumerate(chats):
            rng = np.random.default_rng([workload.seed, number])
            ids = rng.integers(0, VOCAB, prompt_tokens, dtype=np.int32)
            sampling = SamplingParams(answer_tokens if max_tokens is None else max_tokens)
            yield TimedRequest(arrival_s, EngineRequest(str(number), ids, SCOPE, ROOT, sampling), answer_tokens)

    seen = Seen(replica.clock)
    replica.run(requests(), seen)
    return {
        "output_tokens_per_s": sum(answer_tokens for _, _, answer_tokens in chats) / replica.clock(),
        "running_mean": seen.running / seen.steps,
        "ttft_s": spread(seen.ttft_s),
        "request_s": spread(seen.whole_s),
        "between_tokens_s": spread(seen.pauses_s),
        "preemptions": seen.preemptions,
        "recomputed_tokens": seen.recomputed_tokens,
    }


def measure_admission(workload: ChatWorkload) -> dict[str, Any]:
    """Return the figures of each rule by the ``max_tokens`` that clients leave open."""
    rules: tuple[AdmissionRule, ...] = ("worst_case", "optimistic")
    cases: dict[str, tuple[AdmissionRule, int | None]] = {"known lengths": ("worst_case", None)}
    cases |= {f"{rule}, max_tokens {most}": (rule, most) for rule in rules for most in (1024, 8192)}
    found = {name: drive(workload, *cases[name]) for name in progress(cases, "admission")}
    return {"engine": "simulated", **found}


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--rate", type=float, default=ChatWorkload.__dataclass_fields__["requests_per_s"].default)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    workload = ChatWorkload(requests_per_s=arguments.rate, seed=arguments.seed)
    found = measure_admission(workload)
    rates = {name: row["output_tokens_per_s"] for name, row in found.items() if isinstance(row, dict)}
    each = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
    said = f"Output tokens a second (simulated, in virtual time): {each}."
    write(arguments.json, asdict(workload), found, said)


if __name__ == "__main__":
    main()
