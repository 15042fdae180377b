"""LoRA adapters made by PEFT itself for the tiny models, and PEFT's own results with them.

A machine that runs the tests of GPUs may have no PEFT: there are also adapters made without it.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from router.protocol.block_hash import PrefixScope
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.lora.layers import adaptable_layers
from serve_app.engine.lora.peft_files import describe_adapter
from serve_app.engine.protocol import AdapterSpec
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(model: Path, path: Path, seed: int, targets: tuple[str, ...] = ALL_LINEAR, **config: Any) -> Path:
    """Save a random adapter of the model, strong enough to change its greedy output."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    values: dict[str, Any] = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, **config}
    # PEFT uses a transformers API that is deprecated.
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        made = get_peft_model(
            AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules=list(targets), **values)
        )
    for name, tensor in made.named_parameters():
        if "lora_B" in name:
            tensor.data.normal_(0.0, 0.2)
    made.save_pretrained(path)
    return path


def save_random_adapter(model: Path, path: Path, seed: int, targets: tuple[str, ...] = ALL_LINEAR) -> Path:
    """Save an adapter like those of ``save_adapter``, made without PEFT."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        layers = adaptable_layers(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)))
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        if name.rpartition(".")[2] in targets:
            down = torch.empty(4, layer.in_features).uniform_(-1, 1, generator=generator) / layer.in_features**0.5
            up = torch.empty(layer.out_features, 4).normal_(0.0, 0.2, generator=generator)
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
    path.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(targets)}
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def save_plain(path: Path, fill: float = 1.0) -> Path:
    """Save an adapter as files only; the simulated engine needs no more."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    save_file({"model.x.lora_A.weight": torch.full((1, 4), fill)}, path / "adapter_model.safetensors")
    return path


def peft_greedy(model: Path, adapter: Path, ids: Any, max_tokens: int) -> list[int]:
    from peft import PeftModel

    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        worn = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(adapter)).eval()
    row = torch.tensor(ids, dtype=torch.long)[None]
    found = worn.generate(
        input_ids=row, attention_mask=torch.ones_like(row), max_new_tokens=max_tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = found[0, row.shape[1] :].tolist()
    return tokens


def described(path: Path, name: str = "a") -> tuple[AdapterSpec, PrefixScope]:
    spec = describe_adapter(name, path)
    return spec, PrefixScope("tiny", spec.key)


def simulated_engine(**settings: Any) -> TorchEngine:
    """Return an engine that computes nothing, not started."""
    cost, given = CostModel(prefill_tokens_per_s=1e9, decode_base_s=0.0), EngineSettings(num_blocks=64, **settings)
    return TorchEngine(SimulatedRunner(cost, given), given, lambda _: None)
