"""Rules of LoRA in the engine: PEFT's numbers, batches that mix adapters, slots, and KV that is never shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from router.protocol.block_hash import PrefixScope
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.step import Segment, SegmentResult
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
    """One adapter of the qwen3 model for each variant."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(checkpoints["qwen3"], root / name, seed, **config)
        for seed, (name, config) in enumerate(VARIANTS.items())
    }


def load(engine: TorchEngine, path: Path, name: str = "a") -> PrefixScope:
    spec, scope = described(path, name)
    engine.load_adapter(spec)
    return scope


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_output_is_pefts(
    variant: str, adapters: dict[str, Path], checkpoints: dict[str, Path], make_engine: MakeEngine, reference: Reference
) -> None:
    """Greedy tokens equal PEFT's own model, cold, and again from cached blocks; the base's are untouched.

    docs/lora.md
    """
    engine = make_engine()
    scope = load(engine, adapters[variant])
    ids = prompt(150, 3)
    expected = peft_greedy(checkpoints["qwen3"], adapters[variant], ids, 24)
    plain = reference("qwen3", ids, 24)
    assert expected != plain, "an adapter that changes nothing proves nothing"
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
    """Fifteen requests of three adapters and the base, long and short, in the same steps: each as if it were alone.

    Where there is one slot the adapters take turns. docs/lora.md
    """
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


def test_load_and_unload_while_others_generate(
    checkpoints: dict[str, Path], adapters: dict[str, Path], make_engine: MakeEngine, reference: Reference
) -> None:
    """A stream of the base and one of an adapter run on, with the right tokens, while adapters come and go.

    The running one's own adapter is unloaded under it: it finishes with it, and only then is it gone.
    """
    engine = make_engine()
    scope = load(engine, adapters["all"], "mine")
    collector = Collector()
    engine.submit(request("base", prompt(30), 200), collector)
    engine.submit(request("worn", prompt(30), 200, scope=scope), collector)
    collector.wait_tokens("worn", 5)
    assert engine.unload_adapter(scope.lora)
    assert not engine.unload_adapter(scope.lora)
    others = 0
    while "worn" not in collector.finish and others < 20:
        other = load(engine, adapters["rslora"], f"other{others}")
        got = run_all(engine, [request(f"o{others}", prompt(20, others), 2, scope=other)])
        assert got.finish[f"o{others}"] == "length"
        assert engine.unload_adapter(other.lora)
        others += 1
    collector.wait(["base", "worn"])
    assert others > 1
    assert collector.tokens["base"] == reference("qwen3", prompt(30), 200)
    assert collector.tokens["worn"] == peft_greedy(checkpoints["qwen3"], adapters["all"], prompt(30), 200)
    assert engine.adapters() == ()
    assert dict(engine._runner.adapters._loaded) == {}, "memory is given back once nobody needs it"


class _Recording(SimulatedRunner):
    """Notes which adapters were in each step."""

    steps: list[set[str]]

    def execute(self, segments: Sequence[Segment]) -> list[SegmentResult]:
        self.steps.append({segment.lora.partition("@")[0] for segment in segments if segment.lora})
        return super().execute(segments)


def test_who_waits_for_a_slot_is_not_overtaken_by_adapters_but_by_the_base(
    adapters: dict[str, Path], make_simulated: MakeSimulated
) -> None:
    """One slot: a steady queue of the adapter that holds it cannot starve another; base requests go past."""
    runner = _Recording(CostModel(prefill_tokens_per_s=1e9, decode_base_s=0), max_loras=1)
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
    assert turns.index("second") == 8, "right after the one that held the slot, before the rest of its queue"
    assert collector.finish["base"] == "length"


def test_a_step_without_adapters_has_no_hooks(adapters: dict[str, Path], make_engine: MakeEngine) -> None:
    """Hooks come with the first row that needs one and leave with the last; without any, the base costs nothing.

    docs/lora.md
    """
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
