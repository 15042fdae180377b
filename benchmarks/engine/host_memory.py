"""Host memory below vLLM's pool: how much of a working set of twice the pool comes back, and how fast.

Prompts are computed one after the other, then return in random orders: each was evicted meanwhile. On a CPU the copies
are replaced, since vLLM's own need a GPU; everything else is vLLM's.
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.output_collector import running
from benchmarks.common.report import BenchmarkError, parser_of, progress, spread, write
from router.core import RoutingCore
from router.protocol.block_hash import PrefixScope, TokenArray, extend_chain
from router.protocol.request import RoutedRequest
from router.settings import RouterSettings
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.sources import resolve_model
from serve_app.config.app import AppConfig
from serve_app.config.engine import vllm_missing
from serve_app.engine.protocol import Engine, EngineOutput, EngineRequest, SamplingParams
from serve_app.replica.engine_factory import make_engine

BLOCK = 32


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__, "demo")
    parser.add_argument("--blocks", type=int, default=512, help=f"blocks of {BLOCK} tokens in the pool")
    parser.add_argument("--prompt-tokens", type=int, default=3200)
    parser.add_argument("--working-set", type=float, default=2.0, help="tokens of all prompts by those of the pool")
    parser.add_argument("--kv-offloading-size", type=float, default=1.0, help="GiB of host memory; 0: none")
    parser.add_argument("--rounds", type=int, default=5, help="returns of each prompt")
    parser.add_argument("--gpus", type=int, default=0, help="1: on a GPU")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    if vllm_missing():
        raise BenchmarkError("vLLM is not installed here")
    results = measure(resolve_model(arguments.model), arguments)
    said = (
        f"Of a working set of {arguments.working_set:g} x the pool, {results['hit_rate']:.3f} of the reusable tokens "
        f"were reused; predictions were exact for {results['exact']:.2%} of {results['returns']} returns; a return's "
        f"first token took {results['ratio']:.2f} of a computed one's time."
    )
    write(arguments.json, vars(arguments), results, said)


def measure(model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return hit rate, exact predictions, and times to the first token of computed prompts and of returns."""
    info = load_checkpoint_info(model)
    config = AppConfig(
        model=str(model),
        engine="vllm",
        dtype=arguments.dtype,
        device="cuda" if arguments.gpus else "cpu",
        replica_num_gpus=arguments.gpus,
        block_size=BLOCK,
        num_blocks=arguments.blocks,
        max_model_len=arguments.prompt_tokens + 64,
        max_num_seqs=8,
        enforce_eager=not arguments.gpus,
        pin_budget=0.1,
        kv_pull=True,
        kv_offloading_size=arguments.kv_offloading_size or None,
    )
    core = RoutingCore("host memory", RouterSettings(block_size=BLOCK))
    core.update_replicas(["replica"])
    rng, scope = random.Random(1), PrefixScope(info.fingerprint)
    count = round(arguments.working_set * arguments.blocks * BLOCK / arguments.prompt_tokens)
    numbers = np.random.default_rng(1)
    prompts = [numbers.integers(3, info.vocab_size, arguments.prompt_tokens, dtype=np.int32) for _ in range(count)]
    if arguments.gpus:
        patched: Any = nullcontext()
    else:
        from benchmarks.common.cpu_memory import offloading_on_cpu

        patched = offloading_on_cpu()
    computed_s, returned_s, exact, cached = list[float](), list[float](), 0, 0
    with patched:
        engine = make_engine(config, info, lambda events: core.apply("replica", events))
    with running(engine):
        ask(engine, "warm up", numbers.integers(3, info.vocab_size, 1000, dtype=np.int32), scope)
        for number, ids in enumerate(progress(prompts, "computed")):
            computed_s.append(ask(engine, f"computed {number}", ids, scope)[1])
        order = [at for _ in range(arguments.rounds) for at in rng.sample(range(count), count)]
        for number, at in enumerate(progress(order, "returned")):
            time.sleep(0.05)  # the last events arrive
            chain = extend_chain(scope.root(bytes(16)), 0, prompts[at], BLOCK)
            known = core.holders(RoutedRequest("q", chain, len(prompts[at]))).get("replica", 0)
            found, took_s = ask(engine, f"returned {number}", prompts[at], scope)
            returned_s.append(took_s)
            exact += found == known
            cached += found
        rate = engine.load().tier_tokens_per_s
    reusable = (arguments.prompt_tokens - 1) // BLOCK * BLOCK * len(order)
    return {
        "prompts": count,
        "returns": len(order),
        "hit_rate": cached / reusable,
        "exact": exact / len(order),
        "computed_s": spread(computed_s),
        "returned_s": spread(returned_s),
        "ratio": statistics.median(returned_s) / statistics.median(computed_s),
        "loaded_tokens_per_s": rate,
    }


def ask(engine: Engine, name: str, ids: TokenArray, scope: PrefixScope) -> tuple[int, float]:
    """Return a request's cached tokens, and the seconds until its first token."""
    first, ended = list[tuple[int, float]](), threading.Event()

    def sink(outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            if output.first is not None:
                first.append((output.first.cached_tokens, time.perf_counter() - began_s))
            if output.finish_reason is not None:
                ended.set()

    request = EngineRequest(
        request_id=name,
        token_ids=ids,
        scope=scope,
        root=scope.root(bytes(16)),
        sampling=SamplingParams(max_tokens=4, temperature=0.0),
    )
    began_s = time.perf_counter()
    engine.submit(request, sink)
    ended.wait()
    if not first:
        raise BenchmarkError(f"request {name} failed")
    return first[0]


if __name__ == "__main__":
    main()
