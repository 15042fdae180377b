"""Speculative decoding: base steps per token, acceptance, and tokens per second with and without a drafter.

Three pairs on one engine without HTTP: the model drafting for itself, a drafter that mostly agrees, and one that never
does. With ``--head`` an EAGLE-3 head instead. Outputs are compared in float32.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.output_collector import OutputCollector, running
from benchmarks.common.report import parser_of, progress, write
from benchmarks.engine.draft_pairs import build_pairs, eagle_pair
from router.protocol.block_hash import PrefixScope
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.engine.core.build import build_engine
from serve_app.engine.protocol import EngineRequest, SamplingParams
from serve_app.engine.settings import EngineSettings

_SCOPE = PrefixScope("benchmark")


@dataclass(frozen=True, slots=True)
class Workload:
    """``sequences`` prompts of random tokens at once, each answered with ``max_tokens``."""

    sequences: int
    prompt_tokens: int
    max_tokens: int
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """An engine's outputs and rates."""

    tokens: dict[str, list[int]]
    tokens_per_s: float
    acceptance_rate: float
    base_steps_per_token: float


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__, "small")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--head", default="", help="'eagle', or the directory of an EAGLE-3 head for --model")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        model = resolve_model(arguments.model)
        if arguments.head == "eagle":
            pairs = {"eagle_agreeing": eagle_pair(model, Path(directory))}
        elif arguments.head:
            pairs = {"head": (model, Path(arguments.head))}
        else:
            pairs = build_pairs(model, Path(directory))
        cases = [(pair, n, t) for pair in pairs for n in arguments.sequences for t in arguments.temperature]
        for pair, sequences, temperature in progress(cases, "speculation"):
            workload = Workload(sequences, arguments.prompt_tokens, arguments.max_tokens, temperature)
            measured = compare(*pairs[pair], workload, arguments.num_speculative_tokens, threads=arguments.threads)
            rows.append({"pair": pair, "sequences": sequences, "temperature": temperature, **measured})
    each = "; ".join(
        f"{pair} {min(steps):.2f} to {max(steps):.2f}"
        for pair in pairs
        if (steps := [row["base_steps_per_token"] for row in rows if row["pair"] == pair])
    )
    equal, speed_ups = sum(row["outputs_equal"] for row in rows), [row["speed_up"] for row in rows]
    said = (
        f"Base steps per token: {each}. Tokens a second: {min(speed_ups):.2f} to {max(speed_ups):.2f} times those "
        f"without a drafter. In float32 {equal} of {len(rows)} outputs were equal."
    )
    write(arguments.json, vars(arguments), rows, said)


def compare(model: Path, drafter: Path, workload: Workload, ahead: int, *, threads: int = 0) -> dict[str, Any]:
    """Time a workload without and with a drafter in the machine's own dtype, and compare outputs in float32."""
    off = run(model, None, workload, threads=threads)
    on = run(model, drafter, workload, ahead, threads=threads)
    exact = [run(model, which, workload, ahead, dtype="float32", threads=threads).tokens for which in (None, drafter)]
    return {
        "base_steps_per_token": on.base_steps_per_token,
        "acceptance_rate": on.acceptance_rate,
        "tokens_per_s_on": on.tokens_per_s,
        "tokens_per_s_off": off.tokens_per_s,
        "speed_up": on.tokens_per_s / off.tokens_per_s,
        "outputs_equal": exact[0] == exact[1],
    }


def run(
    model: Path, drafter: Path | None, workload: Workload, ahead: int = 0, *, dtype: str = "auto", threads: int = 0
) -> Run:
    """Answer a workload on a fresh engine; ``tokens_per_s`` counts from submission to the last token."""
    settings = EngineSettings(
        num_blocks=2 + workload.sequences * (2 + (workload.prompt_tokens + workload.max_tokens) // 16),
        dtype=dtype,
        num_threads=threads,
        speculative_model=str(drafter or ""),
        num_speculative_tokens=ahead if drafter else 0,
        enable_prefix_caching=False,
    )
    engine = build_engine(model, settings, lambda _: None)
    vocabulary = load_checkpoint_info(model).vocab_size
    generator = np.random.default_rng(7)

    def request(number: int, max_tokens: int) -> EngineRequest:
        ids = generator.integers(0, vocabulary, workload.prompt_tokens, dtype=np.int32)
        sampling = SamplingParams(max_tokens, temperature=workload.temperature, seed=number)
        return EngineRequest(f"r{number}", ids, _SCOPE, _SCOPE.root(b"benchmark"), sampling)

    collector = OutputCollector()
    with running(engine):
        OutputCollector().answer_all(engine, [request(1, 8)])  # a warm-up
        before = {name: value for name, _, value in engine.stats().samples}
        requests = [request(2 + i, workload.max_tokens) for i in range(workload.sequences)]
        seconds = collector.answer_all(engine, requests)
        after = {name: value for name, _, value in engine.stats().samples}

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    generated = grown("warmpath_generation_tokens_total")
    drafted = grown("warmpath_spec_decode_num_draft_tokens_total")
    return Run(
        tokens=collector.tokens,
        tokens_per_s=generated / seconds,
        acceptance_rate=grown("warmpath_spec_decode_num_accepted_tokens_total") / drafted if drafted else 0.0,
        base_steps_per_token=grown("warmpath_spec_decode_base_steps_total") / generated if drafter else 1.0,
    )


if __name__ == "__main__":
    main()
