"""Rules of LoRA in the engine: PEFT's numbers and files, mixed batches, slots, and KV that is never shared."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from router.protocol.block_hash import PrefixScope
from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.lora.layers import AdapterWeights, LoraLayers, LoraPair
from serve_app.engine.lora.peft_files import describe_adapter, parse_config
from serve_app.engine.protocol import AdapterError, AdapterSpec
from serve_app.engine.runner.model_runner import ModelRunner
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
    assert len(engine.runner.adapters.in_slots) == min(max_loras, 3)
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
    model = engine.runner.model  # type: ignore[attr-defined]

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


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def saved(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(checkpoints["qwen3"], tmp_path_factory.mktemp("adapter"), 1, ("q_proj",))


@pytest.fixture(scope="module")
def runner(checkpoints: dict[str, Path]) -> ModelRunner:
    return ModelRunner(checkpoints["qwen3"], EngineSettings(num_blocks=4, dtype="float32", max_lora_rank=8))


def rewritten(saved: Path, to: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Path:
    """Return a copy of the adapter with other config fields and tensors (None: removed); __ stands for the dots."""
    to.mkdir(exist_ok=True)
    fields = json.loads((saved / "adapter_config.json").read_text()) | (config or {})
    (to / "adapter_config.json").write_text(json.dumps(fields))
    held: dict[str, torch.Tensor | None] = {**load_file(saved / "adapter_model.safetensors")}
    held |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, to / "adapter_model.safetensors", metadata={"format": "pt"})
    return to


def test_the_digest_covers_everything_the_adapter_computes(saved: Path, tmp_path: Path) -> None:
    """Other weights or another scale change the digest; another path, or text in the config, does not."""
    original = describe_adapter("a", saved)
    copy = describe_adapter("a", rewritten(saved, tmp_path / "copy", {"base_model_name_or_path": "elsewhere"}))
    assert copy.digest == original.digest == describe_adapter("a", saved / "adapter_model.safetensors").digest
    assert copy.path != original.path
    scaled = describe_adapter("a", rewritten(saved, tmp_path / "scaled", {"lora_alpha": 9}))
    rs = describe_adapter("a", rewritten(saved, tmp_path / "rs", {"use_rslora": True}))
    tensor = load_file(saved / "adapter_model.safetensors")[f"{Q}.lora_A.weight"].clone()
    tensor[0, 0] += 1e-3
    moved = rewritten(saved, tmp_path / "moved", **{f"{Q}.lora_A.weight".replace(".", "__"): tensor})
    digests = {original.digest, scaled.digest, rs.digest, describe_adapter("a", moved).digest}
    assert len(digests) == 4
    assert AdapterSpec.of_key(original.key, original.path) == original


@pytest.mark.parametrize("name", ["", "a@b", "a b", "../x", "-a", "a" * 129, "a\n"])
def test_names_that_could_be_taken_for_a_key_or_a_path_are_refused(name: str, saved: Path) -> None:
    with pytest.raises(AdapterError, match="not a valid adapter name"):
        describe_adapter(name, saved)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"a_feature_of_tomorrow": {"on": 1}}, "a_feature_of_tomorrow is not supported"),
        ({"bias": "all"}, "trained biases"),
        ({"peft_type": "IA3"}, "only LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"r": 0}, "r must be"),
        ({"r": True}, "r must be"),
        ({"lora_alpha": "8"}, "lora_alpha must be"),
    ],
)
def test_unsupported_features_are_refused_by_name(fields: dict[str, Any], reason: str, saved: Path) -> None:
    """Ignoring any of these would give other numbers than the adapter was trained for. (docs: adapters)"""
    config = json.loads((saved / "adapter_config.json").read_text())
    assert parse_config(json.dumps(config).encode()).rank == 4
    with pytest.raises(AdapterError, match=reason):
        parse_config(json.dumps(config | fields).encode())


def test_files_that_are_no_adapter_are_refused_without_their_path(
    saved: Path, tmp_path: Path, runner: ModelRunner
) -> None:
    """A message may reach a client: it names the file, never the directory."""
    empty = tmp_path / "empty"
    empty.mkdir()
    lone = tmp_path / "lone"
    lone.mkdir()
    (lone / "adapter_model.safetensors").write_bytes(b"x")
    torn = rewritten(saved, tmp_path / "torn")
    whole = (torn / "adapter_model.safetensors").read_bytes()
    (torn / "adapter_model.safetensors").write_bytes(whole[:-10])
    text = rewritten(saved, tmp_path / "text")
    (text / "adapter_config.json").write_text("[]")
    for path, reason in (
        (empty, "no adapter_model.safetensors"),
        (tmp_path / "nowhere", "no adapter_model.safetensors"),
        (lone, "adapter_config.json is missing"),
        (text, "not a JSON object"),
        (torn, "not a complete safetensors file"),
    ):
        with pytest.raises(AdapterError, match=reason) as caught:
            runner.adapters.load(describe_adapter("a", path))
        assert str(tmp_path) not in str(caught.value)
    assert runner.adapters.loaded == ()


@pytest.mark.parametrize(
    ("config", "tensors", "reason"),
    [
        ({"r": 5}, {}, "this model and rank need"),
        ({}, {f"{Q}.lora_B.weight": torch.zeros(4, 4)}, "this model and rank need"),
        ({}, {f"{Q}.lora_B.weight": None}, "only one of"),
        ({}, {f"{Q}.lora_B.weight": torch.full((64, 4), float("nan"))}, "not finite"),
        ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 4)}, "lora_embedding_A"),
        ({}, {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}, "no linear layer 'lm_head'"),
        ({}, {"base_model.model.model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, "only lora_A and lora_B"),
    ],
)
def test_tensors_are_checked_against_the_model(
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor | None],
    reason: str,
    saved: Path,
    tmp_path: Path,
    runner: ModelRunner,
) -> None:
    """A tensor without a place in this model is refused at load, not during a forward."""
    path = rewritten(saved, tmp_path / "x", config, **{name.replace(".", "__"): t for name, t in tensors.items()})
    with pytest.raises(AdapterError, match=reason):
        runner.adapters.load(describe_adapter("a", path))


def test_ranks_over_the_limit_and_files_that_changed_are_refused(
    checkpoints: dict[str, Path], saved: Path, tmp_path: Path, runner: ModelRunner
) -> None:
    """``max_lora_rank`` bounds memory; a file that differs from its description must not be used under its key."""
    big = save_adapter(checkpoints["qwen3"], tmp_path / "big", 2, ("q_proj",), r=9)
    with pytest.raises(AdapterError, match="over max_lora_rank 8"):
        runner.adapters.load(describe_adapter("big", big))
    path = rewritten(saved, tmp_path / "changing")
    spec = describe_adapter("a", path)
    rewritten(saved, path, {"lora_alpha": 1})
    with pytest.raises(AdapterError, match="changed after it was loaded"):
        runner.adapters.load(spec)
    (path / "adapter_config.json").write_text('{"peft_type": "TOPSECRET"}')
    with pytest.raises(AdapterError, match="changed after it was loaded") as refused:
        runner.adapters.load(spec)
    assert "TOPSECRET" not in str(refused.value), "it could be a link by now"
