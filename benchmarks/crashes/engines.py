"""What is crashed: engines in this process, or the settings of an instance, with adapters and a public prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.random_adapters import make_adapters
from benchmarks.common.running import running
from benchmarks.crashes.calls import CallCrashes
from benchmarks.engine.draft_pairs import build_pairs
from serve_app.cache.tiers.tiers import TierSettings
from serve_app.checkpoints.adapter_registry import AdapterEntry, AdapterRegistry
from serve_app.checkpoints.checkpoint import CheckpointInfo, load_checkpoint_info, weights_fingerprint
from serve_app.config.app import AppConfig
from serve_app.config.prompts import PublicPromptConfig
from serve_app.config.vllm import CPU_BLOCK_SIZE
from serve_app.engine.core.build import load_runner
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import Engine
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Runner
from serve_app.generation.prepare import Limits, Preparer
from serve_app.prompts.registry import Prompts
from serve_app.replica.engine_factory import make_engine
from serve_app.structured.compiler import GrammarCompiler
from serve_app.structured.matcher import Matchers
from serve_app.tenants.tenants import Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer

ADAPTERS = ("adapter-0", "adapter-1")
PROMPT = PublicPromptConfig(name="clerk", version="1", text="You are a careful clerk. Name clause and date. " * 12)


def public_prompts(kind: str) -> list[PublicPromptConfig]:
    """Return what an engine of this kind can be asked for by its name."""
    return [] if kind == "vllm" else [PROMPT]


_SECRET = b"crashes benchmark, not a secret."
_MAX_MODEL_LEN = 2048


def _vllm(info: CheckpointInfo, settings: EngineSettings) -> Engine:
    """Return vLLM, in processes of its own, with room for as many tokens."""
    shared = ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_waiting_requests")
    config = AppConfig.model_validate(
        {
            **{name: getattr(settings, name) for name in (*shared, "num_threads", "max_loras", "max_cpu_loras")},
            "model": str(info.path),
            "engine": "vllm",
            "block_size": settings.block_size,
            "num_blocks": settings.num_blocks,
            "allow_runtime_lora": True,
            "max_lora_rank": 8,
            "enforce_eager": True,
        }
    )
    return make_engine(config, info, lambda _: None)


@contextmanager
def call_crashes(
    kind: str, model: Path, directory: Path, rng: random.Random, *, dtype: str = "float32", drafts: bool = False
) -> Iterator[CallCrashes]:
    """Start two engines for this process, "torch", "simulated" or "vllm", behind one dispatcher.

    ``drafts``: a draft model speculates for the model; both are cut from it (see ``build_pairs``).
    """
    drafter = ""
    if drafts:
        model, smaller = build_pairs(model, directory / "pairs")["agreeing"]
        drafter = str(smaller)
    info = load_checkpoint_info(model)
    block_size = CPU_BLOCK_SIZE if kind == "vllm" else 16
    settings = EngineSettings(
        block_size=block_size,
        num_blocks=768 * 16 // block_size,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        max_waiting_requests=1024,
        pin_budget_blocks=128,
        dtype=dtype,
        num_threads=1,
        max_loras=2,
        max_cpu_loras=2,
        model_fingerprint=info.fingerprint,
        speculative_model=drafter,
        speculative_fingerprint=weights_fingerprint(Path(drafter)) if drafts else "",
        num_speculative_tokens=3 if drafts else 0,
        tiers=TierSettings(),
    )
    specs = make_adapters(model, directory / "adapters", len(ADAPTERS), rank=4)

    def engine() -> Engine:
        if kind == "vllm":
            return _vllm(info, settings)
        return TorchEngine(runner(), settings, lambda _: None)

    def runner() -> Runner:
        if kind == "torch":
            return load_runner(model, settings)
        cost = CostModel(vocab_size=info.vocab_size, max_positions=_MAX_MODEL_LEN)
        return SimulatedRunner(cost, sleep=lambda _: None, model_fingerprint=info.fingerprint)

    adapters = AdapterRegistry("demo")
    adapters.merge(AdapterEntry(spec.name, spec) for spec in specs)
    tokenizer, prompts = PromptTokenizer(model, block_size=block_size), Prompts(public_prompts(kind))
    prompts.install(tokenizer)
    limits = Limits(_MAX_MODEL_LEN, 32)
    simulated = kind == "simulated"
    tenants = Tenants([], _SECRET)
    preparer = Preparer(info, tokenizer, tenants, _SECRET, adapters, limits, prompts, simulated=simulated)
    with ExitStack() as stack:
        engines = [stack.enter_context(running(engine())) for _ in range(2)]
        for each, spec in product(engines, specs):
            each.load_adapter(spec)
        matchers = Matchers(GrammarCompiler(info.path, info.vocab_size, info.eos_token_ids))
        yield CallCrashes(engines, block_size, preparer, tokenizer, matchers, rng)


def instance_settings(
    kind: str, model: Path, directory: Path, *, replicas: int, dtype: str = "float32", drafts: bool = False
) -> dict[str, Any]:
    """Return the settings of an instance that serves the same, its adapters below ``directory``."""
    speculation: dict[str, Any] = {}
    if drafts:
        model, drafter = build_pairs(model, directory / "pairs")["agreeing"]
        speculation = {"speculative_model": str(drafter), "num_speculative_tokens": 3}
    make_adapters(model, directory / "adapters", len(ADAPTERS), rank=4)
    return {
        "model": str(model),
        "served_model_name": "demo",
        "engine": kind,
        "replicas": replicas,
        "dtype": dtype,
        "kv_cache_bytes": 64 << 20,
        "max_model_len": _MAX_MODEL_LEN,
        "num_threads": 1,
        "lora_adapters": {name: str(directory / "adapters" / name) for name in ADAPTERS},
        "public_prompts": [prompt.model_dump(include={"name", "version", "text"}) for prompt in public_prompts(kind)],
        "enforce_eager": kind == "vllm",
        "max_lora_rank": 8,
        **speculation,
    }
