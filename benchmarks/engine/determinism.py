"""Which answers at temperature 0 are equal to a cold one: cached, in other steps, beside others, over other blocks.

One engine of one process, no crash, no error; every case asks the same prompts and counts the answers that differ from
a cold run in steps of 512 tokens, in each dtype. `python -m benchmarks determinism --json FILE`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.common.output_collector import OutputCollector
from benchmarks.common.prompts import text_of, tokenizer_of
from benchmarks.common.report import parser_of, progress, write
from benchmarks.common.running import running
from router.protocol.block_hash import PrefixScope, TokenArray
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.engine.core.build import load_runner
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import EngineRequest, SamplingParams
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Runner

LEAST_TOKENS, LONGER_TOKENS = 821, 110
"""Of the shortest prompt, and how much longer the longest is: two steps of 512 tokens each."""

STEP_TOKENS, OTHER_STEP_TOKENS, ONE_STEP_TOKENS = 512, 504, 2048
NUM_BLOCKS = 256
"""Of the pool: three prompts and what they are answered."""


class Case:
    """Asks in one way. ``at_once``: asks prompts together on one engine and returns their answers."""

    def __init__(self, runner: Runner, settings: EngineSettings, prompts: Sequence[TokenArray], tokens: int) -> None:
        self._runner = runner
        self._settings = settings
        self._prompts = prompts
        self._sampling = SamplingParams(tokens, temperature=0.0)

    def cold(self, number: int, step_tokens: int = STEP_TOKENS) -> list[int]:
        """Return the answer of an engine that has seen nothing."""
        return self._alone(number, step_tokens, lambda _: None)

    def cached(self, number: int) -> list[int]:
        """Return the answer where all but the last tokens are in the cache."""
        return self._alone(number, STEP_TOKENS, lambda engine: self.at_once(engine, [number]))

    def other_blocks(self, number: int) -> list[int]:
        """Return a cold answer over other blocks, which lie in order too."""
        other = len(self._prompts) - 1 - number
        return self._alone(number, STEP_TOKENS, lambda engine: self.at_once(engine, [other]), salt=b"other")

    def beside_others(self, number: int) -> list[int]:
        """Return a cold answer that two other prompts were computed beside."""
        engine = self._engine(STEP_TOKENS)
        with running(engine):
            return self.at_once(engine, [(number + after) % len(self._prompts) for after in range(3)])[0]

    def scattered_blocks(self, number: int) -> list[int]:
        """Return a cold answer over blocks of which no two are neighbours: of a full pool every second one is free."""
        generator = np.random.default_rng(number)
        short = [generator.integers(300, 4000, 17, dtype=np.int32) for _ in range(NUM_BLOCKS)]

        def scatter(engine: TorchEngine) -> None:
            self._ask(engine, short, b"short", replace(self._sampling, max_tokens=0))
            self._ask(engine, short[::2], b"short", replace(self._sampling, max_tokens=0))

        return self._alone(number, STEP_TOKENS, scatter)

    def at_once(self, engine: TorchEngine, numbers: Sequence[int], salt: bytes = b"") -> list[list[int]]:
        """Ask prompts together; return their answers."""
        return self._ask(engine, [self._prompts[number] for number in numbers], salt, self._sampling)

    def _alone(
        self, number: int, step_tokens: int, before: Callable[[TorchEngine], object], salt: bytes = b""
    ) -> list[int]:
        engine = self._engine(step_tokens)
        with running(engine):
            before(engine)
            return self.at_once(engine, [number], salt)[0]

    def _engine(self, step_tokens: int) -> TorchEngine:
        # A new one knows no rate of its own, by which it would choose other steps.
        return TorchEngine(self._runner, replace(self._settings, max_num_batched_tokens=step_tokens), lambda _: None)

    def _ask(
        self, engine: TorchEngine, prompts: Sequence[TokenArray], salt: bytes, sampling: SamplingParams
    ) -> list[list[int]]:
        scope = PrefixScope("benchmark", salt=salt)
        root = scope.root(b"a benchmark's secret")
        collector = OutputCollector()
        requests = [EngineRequest(str(i), ids, scope, root, sampling) for i, ids in enumerate(prompts)]
        collector.answer_all(engine, requests)
        return [collector.tokens[request.request_id] for request in requests]


CASES: dict[str, Callable[[Case, int], list[int]]] = {
    "cold again, other blocks in order": Case.other_blocks,
    "all but its last tokens from the cache": Case.cached,
    "cold, in steps of 504 tokens": lambda case, number: case.cold(number, OTHER_STEP_TOKENS),
    "cold, in one step": lambda case, number: case.cold(number, ONE_STEP_TOKENS),
    "cold, beside two other prompts": Case.beside_others,
    "cold, over scattered blocks": Case.scattered_blocks,
}


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__, "demo")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--prompts", type=int, default=8, help="at least 3")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.prompts < 3:
        parser.error("--prompts must be at least 3: one is asked beside two others")
    model = resolve_model(arguments.model)
    lengths = [LEAST_TOKENS + LONGER_TOKENS * i // (arguments.prompts - 1) for i in range(arguments.prompts)]
    tokenizer, root = tokenizer_of(model), b"\0" * 16
    prompts = [tokenizer.encode(text_of(tokens, model, i), root).token_ids for i, tokens in enumerate(lengths)]
    results: dict[str, dict[str, int]] = {}
    for dtype in arguments.dtype:
        settings = EngineSettings(num_blocks=NUM_BLOCKS, dtype=dtype, num_threads=arguments.threads)
        case = Case(load_runner(model, settings), settings, prompts, arguments.tokens)
        results[dtype] = differing(case, dtype, arguments.prompts)
    each = ". ".join(
        f"{dtype}: " + "; ".join(f"{count} {name}" for name, count in counted.items())
        for dtype, counted in results.items()
    )
    said = f"Of {arguments.prompts} answers so many differ from a cold one in steps of {STEP_TOKENS} tokens. {each}."
    write(arguments.json, vars(arguments), results, said)


def differing(case: Case, dtype: str, prompts: int) -> dict[str, int]:
    """Return by case how many answers are not those of the cold run."""
    expected = [case.cold(number) for number in range(prompts)]
    found: dict[str, int] = {}
    for name in progress(list(CASES), dtype):
        found[name] = sum(CASES[name](case, number) != expected[number] for number in range(prompts))
    return found


if __name__ == "__main__":
    main()
