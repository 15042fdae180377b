"""Rules of an adapter on disk: what it is called by, and the sentence for each thing that is not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_app.engine.lora.peft_files import describe_adapter
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
    """A copy of the adapter with other config fields and tensors (None: without it); __ stands for the dots."""
    to.mkdir(exist_ok=True)
    fields = json.loads((saved / "adapter_config.json").read_text()) | (config or {})
    (to / "adapter_config.json").write_text(json.dumps(fields))
    held: dict[str, torch.Tensor | None] = {**load_file(saved / "adapter_model.safetensors")}
    held |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, to / "adapter_model.safetensors", metadata={"format": "pt"})
    return to


def test_the_digest_is_of_what_the_adapter_computes(saved: Path, tmp_path: Path) -> None:
    """Other weights or another scale are another digest; another path, or words in the config, are not."""
    original = describe_adapter("a", saved)
    copy = describe_adapter("a", rewritten(saved, tmp_path / "copy", {"base_model_name_or_path": "elsewhere"}))
    assert copy.digest == original.digest
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
    with pytest.raises(AdapterError, match="no adapter name"):
        describe_adapter(name, saved)
