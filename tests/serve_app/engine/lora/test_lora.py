"""Rules of LoRA in the engine: PEFT's numbers, batches that mix adapters, slots, and KV that is never shared."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import PrefixScope
from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.lora.layers import LoraLayers
from serve_app.engine.lora.weights import AdapterWeights, LoraPair
from serve_app.engine.protocol import AdapterSpec
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Segment
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.adapters import described, peft_greedy, save_adapter
from tests.serve_app.engine.simulated import MakeSimulated
from tests.serve_app.engine.tiny import Collector, prompt, request, run_all

VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "attention": {"targets": ("q_proj", "v_proj"), "r": 8, "lora_alpha": 4},
    "rslora": {"targets": ("o_proj", "down_proj"), "use_rslora": True},
}


@pytest.fixture(scope="module")
def adapters(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(checkpoints["qwen3"], root / name, seed, **config)
        for seed, (name, config) in enumerate(VARIANTS.items())
    }


def load(engine: TorchEngine, path: Path, name: str = "a") -> PrefixScope:
    spec, scope = described(path, name)
    engine.adapters.load(spec)
    return scope


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_output_is_pefts(
    variant: str, adapters: dict[str, Path], checkpoints: dict[str, Path], make_engine: MakeEngine, reference: Reference
) -> None:
    """Greedy tokens equal PEFT's own, cold and from cached blocks; the base's are untouched. (docs: adapters)"""
    engine = make_engine()
    scope = load(engine, adapters[variant])
    ids = prompt(150, 3)
    expected = peft_greedy(checkpoints["qwen3"], adapters[variant], ids, 24)
    plain = reference("qwen3", ids, 24)
    assert expected != plain, "an adapter without effect proves nothing"
    for name, cached in (("cold", 0), ("warm", 144)):
        got = run_all(engine, [request(name, ids, 24, scope=scope)])
        assert got.tokens[name] == expected
        assert got.cached[name] == cached
    got = run_all(engine, [request("base", ids, 24)])
    assert got.tokens["base"] == plain
    assert got.cached["base"] == 0, "the base model must not reuse an adapter's KV"


@pytest.mark.parametrize("max_loras", [4, 1])
def test_adapters_mixed_in_one_batch_equal_solo_runs(
    max_loras: int, adapters: dict[str, Path], make_engine: MakeEngine, reference: Reference
) -> None:
    """Fifteen requests of three adapters and the base run as if alone; in one slot they take turns. docs: adapters"""
    engine = make_engine(max_loras=max_loras, max_cpu_loras=4, start=False)
    scopes = [PrefixScope("tiny"), *(load(engine, path, name) for name, path in adapters.items())]
    wanted = [(f"r{i}", prompt(7 + 53 * (i % 5) + i, i), 10 + i, scopes[i % len(scopes)]) for i in range(15)]
    collector = Collector()
    for name, ids, count, scope in wanted:
        engine.submit(request(name, ids, count, scope=scope), collector)
    engine.start()
    collector.wait(name for name, *_ in wanted)
    assert len(engine._runner.adapters.in_slots) == min(max_loras, 3)
    alone = make_engine(enable_prefix_caching=False)
    for name, path in adapters.items():
        load(alone, path, name)
    for name, ids, count, scope in wanted:
        expected = run_all(alone, [request(name, ids, count, scope=scope)]).tokens[name]
        assert collector.tokens[name] == expected, name
        if not scope.lora:
            assert expected == reference("qwen3", ids, count)


class _Recording(SimulatedRunner):
    steps: list[set[str]]

    def execute(self, segments: Sequence[Segment]) -> None:
        self.steps.append({segment.lora.partition("@")[0] for segment in segments if segment.lora})
        super().execute(segments)


def test_a_request_waiting_for_a_slot_is_not_overtaken_by_adapters_but_by_the_base(
    adapters: dict[str, Path], make_simulated: MakeSimulated
) -> None:
    """One slot: a steady queue of its current adapter cannot starve another one; base requests go past."""
    runner = _Recording(CostModel(prefill_tokens_per_s=1e9, decode_base_s=0), EngineSettings(max_loras=1))
    runner.steps = []
    engine = make_simulated(runner, num_blocks=256, max_num_seqs=4, start=False)
    first, second = load(engine, adapters["all"], "first"), load(engine, adapters["rslora"], "second")
    collector = Collector()
    engine.submit(request("a0", prompt(20), 8, scope=first), collector)
    engine.submit(request("b", prompt(20), 2, scope=second), collector)
    for i in range(1, 6):
        engine.submit(request(f"a{i}", prompt(20, i), 8, scope=first), collector)
    engine.submit(request("base", prompt(20), 2), collector)
    engine.start()
    collector.wait(["b", "base", *(f"a{i}" for i in range(6))])
    assert all(len(step) <= 1 for step in runner.steps), "a batch never holds more adapters than slots"
    turns = [next(iter(step)) for step in runner.steps if step]
    assert turns.index("second") == 8, "right after the slot's current request, before its queue"
    assert collector.finish["base"] == "length"


def test_a_step_without_adapters_has_no_hooks(adapters: dict[str, Path], make_engine: MakeEngine) -> None:
    """Hooks are added with the first row that needs one and removed with the last. (docs: adapters)"""
    engine = make_engine()
    model = engine._runner.model  # type: ignore[attr-defined]

    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in model.modules())

    scope = load(engine, adapters["attention"])
    run_all(engine, [request("base", prompt(20), 2)])
    assert hooks() == 0
    run_all(engine, [request("worn", prompt(20), 2, scope=scope)])
    assert hooks() == 4, "two layers' q_proj and v_proj"
    run_all(engine, [request("base", prompt(20), 2)])
    assert hooks() == 0


WIDTH = 6
RANKS = {"a": {"x": 2}, "b": {"x": 3, "y": 1}, "c": {"y": 2}}
"""The layers that each adapter changes, and their ranks."""


steps = st.lists(st.tuples(st.sampled_from(["", *RANKS]), st.sampled_from([1, 1, 2, 40])), min_size=1, max_size=9)


@given(sequence=st.lists(steps, min_size=1, max_size=3))
def test_each_row_has_its_own_adapter_once(sequence: list[list[tuple[str, int]]]) -> None:
    """In any step, each row has its own adapter's product. (docs: adapters)"""
    weights: dict[str, AdapterWeights] = {
        key: {name: LoraPair(torch.randn(rank, WIDTH), torch.randn(rank, WIDTH)) for name, rank in ranks.items()}
        for key, ranks in RANKS.items()
    }
    slots: LoadedAdapters[AdapterWeights] = LoadedAdapters(
        lambda spec: weights[spec.name], max_loras=3, max_cpu_loras=3
    )
    layers = {name: torch.nn.Linear(WIDTH, WIDTH) for name in ("x", "y")}
    lora = LoraLayers(layers, slots, torch.device("cpu"))
    for key in RANKS:
        spec = AdapterSpec(key, "0", "")
        slots.load(spec)
        weights[spec.key] = weights[key]
    for step in sequence:
        packed = sorted(step, key=lambda part: part[1] > 1)
        named = [(AdapterSpec(key, "0", "").key if key else "", count) for key, count in packed]
        for key, _ in named:
            slots.acquire(key)
        segments = [Segment(np.zeros(count, np.int32), 0, [], [], None, lora=key) for key, count in named]
        rows = torch.randn(1, sum(count for _, count in named) + 3, WIDTH)
        lora.apply(segments)
        with torch.inference_mode():
            outputs = {name: layer(rows)[0] for name, layer in layers.items()}
        owner = [key for key, count in named for _ in range(count)] + [""] * 3
        for name, layer in layers.items():
            plain = rows[0] @ layer.weight.t() + layer.bias
            for row, key in enumerate(owner):
                pair = weights[key].get(name) if key else None
                product = 0 if pair is None else rows[0, row] @ pair.down.t() @ pair.up
                torch.testing.assert_close(outputs[name][row], plain[row] + product, rtol=1e-4, atol=1e-4)
        for key, _ in named:
            slots.release(key)
