"""LoRA adapters for vLLM: copies of their files in a private place, by what they compute.

vLLM reads an adapter's files again whenever its own cache dropped it, and does not look whether they changed. So it
gets files that nobody else writes, made from bytes whose digest was checked, for as long as the adapter is loaded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.lora.peft_files import CONFIG_FILE, WEIGHTS_FILE, AdapterFile, read_described
from serve_app.engine.protocol import AdapterError, AdapterSpec

_SAID_CHARS = 200


@dataclass(frozen=True, slots=True)
class VllmAdapter:
    """An adapter that vLLM has. ``request``: what ``VllmFrontend.generate`` takes."""

    number: int
    directory: Path
    request: Any


AddLora = Callable[[str, int, str], Any]
"""(name, number, path) -> what a request needs; waits until vLLM has it."""


class VllmAdapters:
    """The adapters in memory by key; ``slots`` says who needs them and which goes first."""

    def __init__(
        self,
        directory: Path,
        add: AddLora,
        remove: Callable[[int], object],
        *,
        enabled: bool,
        max_loras: int,
        max_cpu_loras: int,
    ) -> None:
        """``directory``: this user's alone. ``remove`` must not wait."""
        self._directory = directory
        self._add = add
        self._remove = remove
        self._enabled = enabled
        self._numbers = count(1)
        self.slots: LoadedAdapters[VllmAdapter] = LoadedAdapters(
            self._load, max_loras=max_loras, max_cpu_loras=max_cpu_loras, on_forget=self._forget
        )

    def _load(self, spec: AdapterSpec) -> VllmAdapter:
        if not self._enabled:
            raise AdapterError(
                "with engine=vllm room for adapters is made at the start; set lora_adapters or allow_runtime_lora"
            )
        file = read_described(spec)
        number = next(self._numbers)
        directory = self._directory / f"{spec.digest[:32]}-{number}"
        directory.mkdir(parents=True)
        try:
            (directory / CONFIG_FILE).write_text(json.dumps(peft_config(file)))
            (directory / WEIGHTS_FILE).write_bytes(file.weights)
            return VllmAdapter(number, directory, self._add(spec.key, number, str(directory)))
        except Exception as error:
            shutil.rmtree(directory, ignore_errors=True)
            said = str(error).replace(str(directory), spec.name).strip().splitlines() or [type(error).__name__]
            raise AdapterError(f"vLLM cannot serve this adapter: {said[-1][:_SAID_CHARS]}") from error

    def _forget(self, adapter: VllmAdapter) -> None:
        self._remove(adapter.number)
        shutil.rmtree(adapter.directory, ignore_errors=True)


def peft_config(file: AdapterFile) -> dict[str, Any]:
    """Return the adapter_config.json of what was read, with nothing that was not."""
    config = file.config
    return {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.use_rslora,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "target_modules": sorted(
            {name.split(".lora_")[0].rpartition(".")[2] for name in file.shapes if ".lora_" in name}
        ),
    }
