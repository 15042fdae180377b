"""What it costs to choose tokens inside vLLM: ours by (seed, position), and vLLM's own with a generator a request.

Both are its sampler's choice from the same logits in one process, in turns. Needs vLLM's environment.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.common.report import BenchmarkError, parser_of, progress, spread, write
from serve_app.config.engine import VLLM_MISSING, vllm_missing
from serve_app.engine.protocol import SamplingParams, TokenRules
from serve_app.engine.vllm.sampling.rows import Row, TokenChoice

PROMPT_TOKENS, ANSWER_TOKENS = 500, 100

_RULES = TokenRules(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1)
KINDS = {
    "greedy": SamplingParams(1024, temperature=0.0),
    "temperature": SamplingParams(1024, temperature=1.0),
    "filters": SamplingParams(1024, temperature=0.7, top_p=0.9, top_k=50),
    "penalties": SamplingParams(1024, temperature=1.0, rules=_RULES),
}
"""Each is measured in a batch of its own, and all of them in one: "mixed"."""

Choose = Callable[[torch.Tensor], Any]


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if vllm_missing():
        raise BenchmarkError(VLLM_MISSING)
    torch.set_num_threads(arguments.threads)
    cases = [(kind, rows) for kind in (*KINDS, "mixed") for rows in arguments.rows]
    results = [
        {"kind": kind, "rows": rows, **measure(kind, rows, arguments.vocabulary, arguments.runs)}
        for kind, rows in progress(cases, "sampler")
    ]
    most = max(arguments.rows)
    each = "; ".join(f"{r['kind']} {r['ratio']['p50']:.2f}" for r in results if r["rows"] == most)
    write(arguments.json, vars(arguments), results, f"Ours / vLLM's time for {most} rows: {each}.")


def measure(kind: str, rows: int, vocabulary: int, runs: int) -> dict[str, Any]:
    """Return the milliseconds of either for one step of ``rows`` [rows, vocabulary], in turns, and their ratios."""
    random = np.random.default_rng(rows)
    logits = torch.from_numpy(random.standard_normal((rows, vocabulary), dtype=np.float32)) * 3
    prompts = random.integers(0, vocabulary, (rows, PROMPT_TOKENS)).tolist()
    answers = random.integers(0, vocabulary, (rows, ANSWER_TOKENS)).tolist()
    kinds = list(KINDS.values()) if kind == "mixed" else [KINDS[kind]]
    params = [replace(kinds[row % len(kinds)], seed=row) for row in range(rows)]
    systems = {"ours": ours(params, prompts, answers), "vllm": theirs(params, prompts, answers, vocabulary)}
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(runs + 1):  # the first warms up
        for name, choose in systems.items():
            own = logits.clone()
            began_s = time.perf_counter()
            choose(own)
            times[name].append(1000 * (time.perf_counter() - began_s))
    ratios = [own / other for own, other in zip(times["ours"][1:], times["vllm"][1:], strict=True)]
    return {f"{name}_ms": spread(taken[1:]) for name, taken in times.items()} | {"ratio": spread(ratios)}


def ours(params: list[SamplingParams], prompts: list[list[int]], answers: list[list[int]]) -> Choose:
    """Return vLLM's sampler as our requests have it."""
    from serve_app.engine.vllm.sampling.processor import PositionSampler

    matchers: Any = None  # no row has a grammar
    rows = {i: Row(TokenChoice(p, 0, "", ""), prompts[i], answers[i], matchers) for i, p in enumerate(params)}
    return _sampler(lambda sampler: PositionSampler(sampler, rows))


def theirs(params: list[SamplingParams], prompts: list[list[int]], answers: list[list[int]], vocabulary: int) -> Choose:
    """Return vLLM's sampler with its own parameters and a generator a request."""
    rules = [p.rules or TokenRules() for p in params]
    ruled, filtered = any(p.rules for p in params), any(p.top_k for p in params)
    return _sampler(
        lambda sampler: sampler,
        temperature=None if all(p.greedy for p in params) else torch.tensor([p.temperature for p in params]),
        all_greedy=all(p.greedy for p in params),
        all_random=not any(p.greedy for p in params),
        top_p=torch.tensor([p.top_p for p in params]) if filtered else None,
        top_k=torch.tensor([p.top_k or vocabulary for p in params], dtype=torch.int32) if filtered else None,
        generators={i: torch.Generator().manual_seed(p.seed) for i, p in enumerate(params) if not p.greedy},
        no_penalties=not ruled,
        prompt_token_ids=torch.tensor(prompts) if ruled else None,
        frequency_penalties=torch.tensor([rule.frequency_penalty for rule in rules]),
        presence_penalties=torch.tensor([rule.presence_penalty for rule in rules]),
        repetition_penalties=torch.tensor([rule.repetition_penalty for rule in rules]),
        output_token_ids=answers if ruled else [],
    )


def _sampler(of: Callable[[Any], Any], **fields: Any) -> Choose:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    none = torch.empty(0)
    defaults: Mapping[str, Any] = {
        **{"temperature": None, "all_greedy": True, "all_random": False, "top_p": None, "top_k": None},
        **{"generators": {}, "max_num_logprobs": None, "logprob_token_ids": None, "no_penalties": True},
        **{"prompt_token_ids": None, "output_token_ids": [], "allowed_token_ids_mask": None, "bad_words_token_ids": {}},
        **dict.fromkeys(("frequency_penalties", "presence_penalties", "repetition_penalties"), none),
    }
    metadata = SamplingMetadata(**{**defaults, **fields}, logitsprocs=LogitsProcessors())
    sampler = of(Sampler())
    return lambda logits: sampler(logits, metadata)


if __name__ == "__main__":
    main()
