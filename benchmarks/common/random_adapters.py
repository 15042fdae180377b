"""LoRA adapters with random weights for any checkpoint, in PEFT's format."""

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from serve_app.engine.lora.peft_files import CONFIG_FILE, WEIGHTS_FILE, describe_adapter
from serve_app.engine.protocol import AdapterSpec

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapters(model: Path, directory: Path, count: int, rank: int = 16) -> list[AdapterSpec]:
    """Write ``count`` adapters for all linear layers of the decoder to ``directory``."""
    shapes = _linear_shapes(model)
    made = []
    for number in range(count):
        generator = np.random.default_rng(number)
        tensors = {
            f"base_model.model.{module}.lora_{part}.weight": 0.02 * generator.standard_normal(shape, dtype=np.float32)
            for module, (rows, columns) in shapes.items()
            for part, shape in (("A", (rank, columns)), ("B", (rows, rank)))
        }
        path = directory / f"adapter-{number}"
        path.mkdir(parents=True)
        save_file(tensors, path / WEIGHTS_FILE)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(TARGETS)}
        (path / CONFIG_FILE).write_text(json.dumps(config))
        made.append(describe_adapter(f"adapter-{number}", path))
    return made


def _linear_shapes(model: Path) -> dict[str, tuple[int, int]]:
    """Return [out, in] by module name. Raises ValueError for a checkpoint without such layers."""
    shapes: dict[str, tuple[int, int]] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(str(file), framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                module = name.removesuffix(".weight")
                if module.rpartition(".")[2] in TARGETS:
                    rows, columns = tensors.get_slice(name).get_shape()
                    shapes[module] = rows, columns
    if not shapes:
        raise ValueError(f"{model} has no linear layers called {', '.join(TARGETS)}")
    return shapes
