"""Decode rate of answers that must match a JSON schema, beside free text, of the same length in the same batch size.

One engine without HTTP; the schema's array is longer than any answer, so that both sides generate every token they may.
With ``--rules`` also penalties, bad words and logprobs. Pairs run in turns.
`python -m benchmarks structured --json FILE`
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common.output_collector import OutputCollector
from benchmarks.common.paired import alternate, ratios
from benchmarks.common.report import parser_of, write
from benchmarks.common.running import running
from router.protocol.block_hash import PrefixScope
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.engine.core.build import build_engine
from serve_app.engine.protocol import EngineRequest, SamplingParams, TokenRules
from serve_app.engine.settings import EngineSettings
from serve_app.structured.compiler import GrammarCompiler, llguidance_form
from serve_app.structured.grammar import Grammar
from serve_app.structured.matcher import Matchers

SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["invoice", "order", "receipt"]},
            "amount": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["name", "kind", "amount", "tags"],
        "additionalProperties": False,
    },
}

_SCOPE = PrefixScope("benchmark")


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__, "demo")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rules", action="store_true", help="also penalties with bad words, and logprobs")
    arguments = parser.parse_args()
    model = resolve_model(arguments.model)
    info = load_checkpoint_info(model)
    matchers = Matchers(GrammarCompiler(info.path, info.vocab_size, info.eos_token_ids))
    form = llguidance_form(Grammar.json_schema(SCHEMA, "schema"))
    blocks = 2 + arguments.sequences * (2 + (arguments.prompt_tokens + arguments.max_tokens) // 16)
    settings = EngineSettings(
        num_blocks=blocks, max_num_seqs=arguments.sequences, num_threads=arguments.threads, enable_prefix_caching=False
    )
    engine = build_engine(model, settings, lambda _: None)
    generator = np.random.default_rng(7)
    number = 0

    def rate(kind: str) -> float:
        """Return generated tokens a second, from submission to the last token."""
        nonlocal number
        requests = []
        for _ in range(arguments.sequences):
            number += 1
            ids = generator.integers(0, info.vocab_size, arguments.prompt_tokens, dtype=np.int32)
            sampling = SamplingParams(arguments.max_tokens, temperature=1.0, seed=number)
            if kind == "rules":
                rules = TokenRules(0.5, 0.5, 1.1, logit_bias=((5, 1.0),), bad_words=((7,), (8, 9)))
                sampling = replace(sampling, rules=rules)
            elif kind == "logprobs":
                sampling = replace(sampling, logprobs=5)
            request = EngineRequest(f"r{number}", ids, _SCOPE, _SCOPE.root(b"benchmark"), sampling)
            requests.append(replace(request, matcher=matchers.matcher(form)) if kind == "schema" else request)
        collector = OutputCollector()
        seconds = collector.answer_all(engine, requests)
        tokens = sum(map(len, collector.tokens.values()))
        assert tokens == arguments.sequences * arguments.max_tokens
        return tokens / seconds

    rows: list[dict[str, Any]] = []
    with running(engine):
        for kind in ("schema", *(("rules", "logprobs") if arguments.rules else ())):
            rate("free")
            rate(kind)

            async def measured(_: int, kind: str = kind) -> float:
                return rate(kind)

            async def against(_: int) -> float:
                return rate("free")

            values = asyncio.run(alternate(arguments.pairs, measured, against))
            rows.append({"kind": kind, **ratios(*values)})
    said = "; ".join(
        f"{row['kind']} {row['ratio']:.2f} ({row['interval'][0]:.2f} to {row['interval'][1]:.2f})" for row in rows
    )
    write(arguments.json, vars(arguments), rows, f"Tokens a second over those of free text, median of pairs: {said}.")


if __name__ == "__main__":
    main()
