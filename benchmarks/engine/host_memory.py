"""Tiers below vLLM's pool: how much of a working set of twice the pool comes back, and how fast.

Prompts are computed one after the other, then return in random orders: each was evicted meanwhile. With a disk or an
object store they also return once after a restart. On a CPU the copies to host memory are replaced, since vLLM's own
need a GPU; everything else is vLLM's.
"""

import random
import statistics
import tempfile
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
from serve_app.checkpoints.checkpoint import CheckpointInfo, load_checkpoint_info
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
    flag("disk", 0.0, "GiB of disk; 0: none"),
    flag("store", 0, "1: an object store in a directory"),
    flag("answer-tokens", 4),
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
        f"first token took {results['ratio']:.2f} of a computed one's time. After a restart: {results['restarted']}.",
    )


def measure(model: Path, options: Options) -> dict[str, Any]:
    """Return hit rate, exact predictions, and times to the first token of computed prompts and of returns."""
    info = load_checkpoint_info(model)
    with tempfile.TemporaryDirectory() as directory:
        return _measure(info, AppConfig(**_settings(model, options, directory)), options)


def _settings(model: Path, options: Options, directory: str) -> dict[str, Any]:
    return {
        "model": str(model),
        "engine": "vllm",
        "dtype": options.dtype,
        "device": "cuda" if options.gpus else "cpu",
        "replica_num_gpus": options.gpus,
        "block_size": BLOCK,
        "num_blocks": options.blocks,
        "max_model_len": options.prompt_tokens + options.answer_tokens + 64,
        "max_num_seqs": 8,
        "enforce_eager": not options.gpus,
        "pin_budget": 0.1,
        "kv_pull": True,
        "kv_offloading_size": options.kv_offloading_size or None,
        "disk_cache_bytes": round(options.disk * 2**30),
        "disk_cache_dir": directory if options.disk else None,
        "object_cache_url": f"file://{directory}/store" if options.store else None,
    }


def _measure(info: CheckpointInfo, config: AppConfig, options: Options) -> dict[str, Any]:
    core = RoutingCore("host memory", RouterSettings(block_size=BLOCK))
    core.update_replicas(["replica"])
    rng, scope = random.Random(1), PrefixScope(info.fingerprint)
    count = round(options.working_set * options.blocks * BLOCK / options.prompt_tokens)
    numbers = np.random.default_rng(1)
    prompts = [numbers.integers(3, info.vocab_size, options.prompt_tokens, dtype=np.int32) for _ in range(count)]
    if options.gpus or not options.kv_offloading_size:
        patched: Any = nullcontext()
    else:
        from benchmarks.common.cpu_memory import offloading_on_cpu

        patched = offloading_on_cpu()
    computed_s, returned_s, exact, cached, restarted = list[float](), list[float](), 0, 0, "not tried"
    decoded_s = list[float]()
    reusable = (options.prompt_tokens - 1) // BLOCK * BLOCK
    with patched:
        engine = make_engine(config, info, lambda events: core.apply("replica", events))
    with running(engine):
        ask(engine, "warm up", numbers.integers(3, info.vocab_size, 1000, dtype=np.int32), scope)
        for number, ids in enumerate(progress(prompts, "computed")):
            computed_s.append(ask(engine, f"computed {number}", ids, scope, options.answer_tokens)[1])
        order = [at for _ in range(options.rounds) for at in rng.sample(range(count), count)]
        for number, at in enumerate(progress(order, "returned")):
            time.sleep(0.05)  # the last events arrive
            chain = extend_chain(scope.root(bytes(16)), 0, prompts[at], BLOCK)
            predicted = core.holders(RoutedRequest("q", chain, len(prompts[at]))).get("replica", 0)
            delivered, took_s, token_s = ask(engine, f"returned {number}", prompts[at], scope, options.answer_tokens)
            returned_s.append(took_s)
            decoded_s.append(token_s)
            exact += delivered == predicted
            cached += delivered
        rate = engine.load().tier_tokens_per_s
    if options.disk or options.store:
        engine = make_engine(config, info, lambda events: None)
        with running(engine):
            ask(engine, "warm up", numbers.integers(3, info.vocab_size, 1000, dtype=np.int32), scope)
            again = [ask(engine, f"restarted {number}", ids, scope) for number, ids in enumerate(prompts)]
        hits = sum(delivered for delivered, *_ in again) / (reusable * count)
        median_s = statistics.median(took_s for _, took_s, _ in again)
        restarted = f"{hits:.3f} of the tokens, {median_s / statistics.median(computed_s):.2f} of the time"
    return {
        "prompts": count,
        "returns": len(order),
        "hit_rate": cached / (reusable * len(order)),
        "exact": exact / len(order),
        "computed_s": spread(computed_s),
        "returned_s": spread(returned_s),
        "decoded_s": spread(decoded_s),
        "restarted": restarted,
        "ratio": statistics.median(returned_s) / statistics.median(computed_s),
        "loaded_tokens_per_s": rate,
    }


def ask(
    engine: Engine, name: str, ids: TokenArray, scope: PrefixScope, answer_tokens: int = 4
) -> tuple[int, float, float]:
    """Return a request's cached tokens, the seconds until its first token, and those of each token after it."""
    outputs = OutputCollector()
    request = EngineRequest(
        request_id=name,
        token_ids=ids,
        scope=scope,
        root=scope.root(bytes(16)),
        sampling=SamplingParams(max_tokens=answer_tokens, temperature=0.0),
    )
    began_s = time.perf_counter()
    outputs.answer_all(engine, [request])
    ended_s, first_s = time.perf_counter(), outputs.first_s[name]
    return outputs.cached_tokens[name], first_s - began_s, (ended_s - first_s) / max(1, answer_tokens - 1)
