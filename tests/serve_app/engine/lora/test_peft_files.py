"""Rules of an adapter on disk: its digest, and the error for each unsupported feature."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_app.engine.lora.peft_files import describe_adapter, parse_config
from serve_app.engine.protocol import AdapterError, AdapterSpec
from serve_app.engine.runner.model_runner import ModelRunner
from serve_app.engine.settings import EngineSettings
from tests.serve_app.engine.adapters import save_adapter

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
