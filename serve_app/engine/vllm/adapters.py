"""LoRA adapters for vLLM: copies of their files in a private directory, named by digest.

vLLM reads files again, unchecked, after its cache dropped them: it gets private copies of checked bytes.
"""

import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.lora.peft_files import CONFIG_FILE, WEIGHTS_FILE, AdapterFile, read_described
from serve_app.engine.protocol import AdapterError, AdapterSpec
from serve_app.engine.vllm.frontend import VllmFrontend
from serve_app.engine.vllm.settings import VllmSettings


class VllmAdapters:
    """The adapters in memory by key, as vLLM's ``LoRARequest``s; ``slots`` tracks their users and eviction order."""

    def __init__(self, directory: Path, frontend: VllmFrontend, settings: VllmSettings) -> None:
        """``directory``: private to this user."""
        self._directory = directory
        self._frontend = frontend
        self._enabled = settings.lora
        self._numbers = count(1)
        self.slots: LoadedAdapters[Any] = LoadedAdapters(
            self._load, max_loras=settings.max_loras, max_cpu_loras=settings.max_cpu_loras, on_forget=self._forget
        )

    def _load(self, spec: AdapterSpec) -> Any:
        if not self._enabled:
            raise AdapterError(
                "with engine=vllm memory for adapters is reserved at startup; set lora_adapters or allow_runtime_lora"
            )
        file = read_described(spec)
        number = next(self._numbers)
        directory = self._directory / f"{spec.digest[:32]}-{number}"
        directory.mkdir(parents=True)
        try:
            (directory / WEIGHTS_FILE).write_bytes(file.weights)
            (directory / CONFIG_FILE).write_text(json.dumps(peft_config(file)))
            return self._frontend.call(self._frontend.add_lora(spec.key, number, str(directory))).result()
        except Exception as error:
            shutil.rmtree(directory, ignore_errors=True)
            said = str(error).replace(str(directory), spec.name).strip().splitlines() or [type(error).__name__]
            raise AdapterError(f"vLLM cannot serve this adapter: {said[-1][:200]}") from error

    def _forget(self, request: Any) -> None:
        self._frontend.call(self._frontend.llm.remove_lora(request.lora_int_id))
        shutil.rmtree(request.lora_path, ignore_errors=True)


def peft_config(file: AdapterFile) -> dict[str, Any]:
    """Return the adapter_config.json of an adapter, limited to the fields that were checked."""
    config = file.config
    return {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.use_rslora,
        "target_modules": sorted(
            {name.split(".lora_")[0].rpartition(".")[2] for name in file.tensors if ".lora_" in name}
        ),
    }
