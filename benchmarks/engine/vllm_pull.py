"""A prefix out of one vLLM pool and into another, against computing it: what a pull costs without the network between.

One engine plays both replicas: it computes a prompt, gives its KV out, forgets it, takes it in again and answers. For
where vLLM is installed (`make venv-vllm`): `.venv-vllm/bin/python -m benchmarks vllm_pull --json FILE`
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common.output_collector import OutputCollector
from benchmarks.common.paired import ratios
from benchmarks.common.report import BenchmarkError, parser_of, progress, write
from router.protocol.block_hash import HASH_BYTES, PrefixScope, extend_chain
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import Engine, EngineRequest, RemoteKv, SamplingParams
from serve_app.replica.engine_factory import make_engine

SCOPE = PrefixScope("pull benchmark")
BLOCK = 32
"""The least that vLLM takes on a CPU."""
PIECE_BLOCKS = 64
_NEW_TOKENS = 32


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__, "small")
    parser.add_argument("--prefix-tokens", type=int, default=8000, help="a multiple of 32, vLLM's block on a CPU")
    parser.add_argument("--runs", type=int, default=5, help="at least 5")
    arguments = parser.parse_args()
    if arguments.runs < 5 or arguments.prefix_tokens % BLOCK:
        parser.error("--runs must be at least 5: fewer say nothing; --prefix-tokens a multiple of 32")
    if importlib.util.find_spec("vllm") is None:
        raise BenchmarkError(f"vLLM is not installed for {sys.executable}: make venv-vllm, then .venv-vllm/bin/python")
    found = _measure(arguments)
    low, high = found["extremes"]
    said = (
        f"TTFT of {arguments.prefix_tokens} tokens pulled out of a vLLM pool and into one / computed, "
        f"{arguments.runs} runs: {found['ratio']:.3f} ({low:.3f} to {high:.3f})."
    )
    write(arguments.json, vars(arguments), {"pull_to_compute": found["ratio"], "details": found}, said)


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    path = resolve_model(arguments.model)
    info = load_checkpoint_info(path)
    tokens = arguments.prefix_tokens + _NEW_TOKENS
    config = AppConfig(
        model=str(path), engine="vllm", kv_pull=True, dtype="float32", block_size=BLOCK, enforce_eager=True,
        num_blocks=tokens // BLOCK + 50, max_model_len=tokens + 64, max_num_seqs=4, replicas=1,
    )  # fmt: skip
    engine = make_engine(config, info, lambda _: None)
    engine.start()
    try:
        runs = [
            _run(engine, np.random.default_rng(seed).integers(0, info.vocab_size, tokens, dtype=np.int32), seed)
            for seed in progress(range(arguments.runs), "pulls")
        ]
    finally:
        engine.stop()
    pulled, computed, exported = zip(*runs, strict=True)
    return {"unit": "s", **ratios(pulled, computed), "of_that_export": sorted(exported)[len(exported) // 2]}


def _run(engine: Engine, ids: np.ndarray, seed: int) -> tuple[float, float, float]:
    """Return seconds to the first token of the pulled prompt and of the computed one, and of the export alone."""
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    request = EngineRequest(f"computed {seed}", ids, SCOPE, SCOPE.root(b"benchmark"), greedy)
    blocks = (len(ids) - 1) // BLOCK
    chain = extend_chain(request.root, 0, ids, BLOCK)[: blocks * HASH_BYTES]
    _forget(engine)
    computed_s = OutputCollector().answer_all(engine, [request])
    while engine.known_blocks(chain, blocks) < blocks:
        time.sleep(0.01)  # its events are on their way
    began_s = time.perf_counter()
    parts = []
    first = 0
    while first < blocks:
        part = engine.export_prefix(SCOPE, ids, chain, first, min(PIECE_BLOCKS, blocks - first))
        if part is None:
            raise BenchmarkError("the prefix was evicted; give the pool more blocks")
        parts.append((first, part))
        first += part.header.blocks
    export_s = time.perf_counter() - began_s
    _forget(engine)
    remote, answer = RemoteKv(blocks * BLOCK), OutputCollector()
    began_s = time.perf_counter()
    engine.submit(replace(request, request_id=f"pulled {seed}", remote_kv=remote), answer)
    for first, part in parts:
        engine.import_part(part, SCOPE, ids, chain, first, "default")
    remote.end()
    engine.wake()
    while not answer.cached_tokens:
        time.sleep(0.001)
    pulled_s = export_s + next(iter(answer.first_s.values())) - began_s
    if next(iter(answer.cached_tokens.values())) < blocks * BLOCK:
        raise BenchmarkError(f"only {answer.cached_tokens} tokens were taken in")
    return pulled_s, computed_s, export_s


def _forget(engine: Engine) -> None:
    while not engine.reset_prefix_cache():
        time.sleep(0.01)


if __name__ == "__main__":
    main()
