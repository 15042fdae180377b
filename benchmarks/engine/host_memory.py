"""Host memory below vLLM's pool: how much of a working set of twice the pool comes back, and how fast.

Prompts are computed one after the other, then return in random orders: each was evicted meanwhile. On a CPU the copies
are replaced, since vLLM's own need a GPU; everything else is vLLM's.
"""

import random
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.harness import Findings, Options, benchmark, flag, progress
from benchmarks.common.output_collector import OutputCollector, running
from benchmarks.common.report import BenchmarkError, spread
from router.core import RoutingCore
from router.protocol.block_hash import PrefixScope, TokenArray, extend_chain
from router.protocol.request import RoutedRequest
from router.settings import RouterSettings
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.sources import resolve_model
from serve_app.config.app import AppConfig
from serve_app.config.engine import vllm_missing
from serve_app.engine.protocol import Engine, EngineRequest, SamplingParams
from serve_app.replica.engine_factory import make_engine

BLOCK = 32


@benchmark(
    __doc__,
    flag("blocks", 512, f"blocks of {BLOCK} tokens in the pool"),
    flag("prompt-tokens", 3200),
    flag("working-set", 2.0, "tokens of all prompts by those of the pool"),
    flag("kv-offloading-size", 1.0, "GiB of host memory; 0: none"),
    flag("rounds", 5, "returns of each prompt"),
    flag("gpus", 0, "1: on a GPU"),
    flag("dtype", "float32"),
    model="demo",
)
def run(options: Options) -> Findings:
    """Compute the prompts, and let them return."""
    if vllm_missing():
        raise BenchmarkError("vLLM is not installed here")
    results = measure(resolve_model(options.model), options)
    return Findings(
        results,
        f"Of a working set of {options.working_set:g} x the pool, {results['hit_rate']:.3f} of the reusable tokens "
        f"were reused; predictions were exact for {results['exact']:.2%} of {results['returns']} returns; a return's "
        f"first token took {results['ratio']:.2f} of a computed one's time.",
    )


def measure(model: Path, options: Options) -> dict[str, Any]:
    """Return hit rate, exact predictions, and times to the first token of computed prompts and of returns."""
    info = load_checkpoint_info(model)
    config = AppConfig(
        model=str(model),
        engine="vllm",
        dtype=options.dtype,
        device="cuda" if options.gpus else "cpu",
        replica_num_gpus=options.gpus,
        block_size=BLOCK,
        num_blocks=options.blocks,
        max_model_len=options.prompt_tokens + 64,
        max_num_seqs=8,
        enforce_eager=not options.gpus,
        pin_budget=0.1,
        kv_pull=True,
        kv_offloading_size=options.kv_offloading_size or None,
    )
    core = RoutingCore("host memory", RouterSettings(block_size=BLOCK))
    core.update_replicas(["replica"])
    rng, scope = random.Random(1), PrefixScope(info.fingerprint)
    count = round(options.working_set * options.blocks * BLOCK / options.prompt_tokens)
    numbers = np.random.default_rng(1)
    prompts = [numbers.integers(3, info.vocab_size, options.prompt_tokens, dtype=np.int32) for _ in range(count)]
    if options.gpus:
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
        order = [at for _ in range(options.rounds) for at in rng.sample(range(count), count)]
        for number, at in enumerate(progress(order, "returned")):
            time.sleep(0.05)  # the last events arrive
            chain = extend_chain(scope.root(bytes(16)), 0, prompts[at], BLOCK)
            predicted = core.holders(RoutedRequest("q", chain, len(prompts[at]))).get("replica", 0)
            delivered, took_s = ask(engine, f"returned {number}", prompts[at], scope)
            returned_s.append(took_s)
            exact += delivered == predicted
            cached += delivered
        rate = engine.load().tier_tokens_per_s
    reusable = (options.prompt_tokens - 1) // BLOCK * BLOCK * len(order)
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
    outputs = OutputCollector()
    request = EngineRequest(
        request_id=name,
        token_ids=ids,
        scope=scope,
        root=scope.root(bytes(16)),
        sampling=SamplingParams(max_tokens=4, temperature=0.0),
    )
    began_s = time.perf_counter()
    outputs.answer_all(engine, [request])
    return outputs.cached_tokens[name], outputs.first_s[name] - began_s
