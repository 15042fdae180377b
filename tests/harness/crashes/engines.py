"""Engines in this process with breaking calls, with adapters and a public prompt."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path

from benchmarks.common.output_collector import running
from benchmarks.common.random_adapters import make_adapters
from serve_app.checkpoints.adapter_registry import AdapterEntry, AdapterRegistry
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.runner.model_runner import load_runner
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Runner
from serve_app.generation.prepare import Limits, Preparer
from serve_app.prompts.registry import Prompts
from serve_app.structured.compiler import GrammarCompiler
from serve_app.structured.matcher import Matchers
from serve_app.tenants import Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.harness.crashes.calls import CallCrashes
from tests.harness.crashes.questions import ADAPTERS, PROMPT
from tests.harness.tiers import tier_settings

_SECRET = b"crashes harness, not a secret..."
_MAX_MODEL_LEN = 2048
BLOCK = 16


@contextmanager
def call_crashes(kind: str, model: Path, directory: Path, rng: random.Random) -> Iterator[CallCrashes]:
    """Start two engines in this process, "torch" or "simulated", behind one dispatcher."""
    info = load_checkpoint_info(model)
    settings = EngineSettings(
        block_size=BLOCK,
        num_blocks=768,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        max_waiting_requests=1024,
        pin_budget_blocks=128,
        dtype="float32",
        num_threads=1,
        max_loras=2,
        max_cpu_loras=2,
        model_fingerprint=info.fingerprint,
        tiers=tier_settings(),
    )
    specs = make_adapters(model, directory / "adapters", len(ADAPTERS), rank=4)

    def runner() -> Runner:
        if kind == "torch":
            return load_runner(model, settings)
        cost = CostModel(vocab_size=info.vocab_size, max_positions=_MAX_MODEL_LEN)
        return SimulatedRunner(cost, settings, sleep=lambda _: None)

    adapters = AdapterRegistry("demo")
    adapters.merge(AdapterEntry(spec.name, spec) for spec in specs)
    tokenizer, prompts = PromptTokenizer(model, block_size=BLOCK), Prompts([PROMPT])
    prompts.install(tokenizer)
    limits = Limits(_MAX_MODEL_LEN, 32)
    simulated = kind == "simulated"
    tenants = Tenants([], _SECRET)
    preparer = Preparer(info, tokenizer, tenants, _SECRET, adapters, limits, prompts, simulated=simulated)
    with ExitStack() as stack:
        engines = [stack.enter_context(running(TorchEngine(runner(), settings, lambda _: None))) for _ in range(2)]
        for engine, spec in product(engines, specs):
            engine.adapters.load(spec)
        matchers = Matchers(GrammarCompiler(info.path, info.vocab_size, info.eos_token_ids))
        yield CallCrashes(engines, BLOCK, preparer, tokenizer, matchers, rng)
