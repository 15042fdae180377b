"""What can be seen of bad settings before anything starts, one sentence each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from serve_app.cli import preflight
from serve_app.cli.preflight import problems
from serve_app.config.app import AppConfig
from serve_app.config.live import BadSettings, app_config
from serve_app.engine.lora.peft_files import CONFIG_FILE, WEIGHTS_FILE


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret is made in a directory that is thrown away."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("WARMPATH_SECRET", raising=False)


def said(model: Path, **settings: Any) -> str:
    """The one sentence about settings of the simulated engine."""
    found = problems(AppConfig.model_validate({"model": str(model), "engine": "simulated", **settings}))
    assert len(found.sentences) == 1, found
    return found.sentences[0]


def test_good_settings_have_none(demo_model_path: Path, tmp_path: Path) -> None:
    """And the model's place is known."""
    tiers = {"host_cache_bytes": 1 << 20, "disk_cache_bytes": 1 << 20, "disk_cache_dir": tmp_path / "disk"}
    settings = AppConfig.model_validate({"model": str(demo_model_path), "engine": "simulated", **tiers})
    found = problems(settings)
    assert (found.model, found.sentences) == (demo_model_path.resolve(), ())
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"disk_cache_bytes": 1000}, "disk_cache_bytes needs disk_cache_dir"),
        ({"num_blocks": 64, "pin_budget": 64}, "pin_budget=64 leaves nothing of 64 blocks"),
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens must exceed max_num_seqs"),
    ],
)
def test_what_settings_say_of_themselves(values: dict[str, Any], words: str) -> None:
    """Needs no machine, and so is told wherever settings are read."""
    with pytest.raises(BadSettings, match=words):
        app_config(values)


def test_a_format_of_tool_calls_that_is_none(demo_model_path: Path) -> None:
    settings = AppConfig.model_validate({"model": str(demo_model_path), "engine": "simulated", "tool_parser": "hermit"})
    (told,) = problems(settings).sentences
    assert told == "tool_parser must be auto or one of hermes, mistral, llama3_json, not 'hermit'"


def test_a_secret_that_cannot_be_used(demo_model_path: Path, tmp_path: Path) -> None:
    """None there, a directory, one that others may read, one of a byte."""
    file = tmp_path / "secret"
    assert (
        said(demo_model_path, secret_file=file) == f"there is no secret file {file}; make it, or leave secret_file out"
    )
    assert "(Is a directory)" in said(demo_model_path, secret_file=tmp_path)
    file.write_text("x")
    file.chmod(0o644)
    assert "others may read" in said(demo_model_path, secret_file=file)
    file.chmod(0o600)
    assert "has 1 characters and needs 16" in said(demo_model_path, secret_file=file)


def test_an_adapter_of_too_high_a_rank(demo_model_path: Path, tmp_path: Path) -> None:
    """By its tensors' shapes, with the module; and one that is not whole."""
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 8}))
    module = "model.layers.0.self_attn.q_proj"
    weights = {f"base_model.model.{module}.lora_A.weight": np.zeros((8, 4), np.float32)}
    save_file(weights, tmp_path / WEIGHTS_FILE)
    settings = {"model": str(demo_model_path), "engine": "simulated", "lora_adapters": {"a": tmp_path}}
    assert not problems(AppConfig.model_validate({**settings, "max_lora_rank": 8})).sentences
    adapter = {"lora_adapters": {"a": tmp_path}}
    sentence = said(demo_model_path, max_lora_rank=4, **adapter)
    assert sentence == f"the adapter 'a' of the settings: {module} has rank 8, over max_lora_rank 4"
    (tmp_path / WEIGHTS_FILE).write_bytes(b"short")
    assert "no whole safetensors file" in said(demo_model_path, **adapter)


def test_budgets_that_cannot_fit(demo_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget under one block, a machine with too little memory, a disk that cannot be written."""
    assert "host_cache_bytes=5 cannot hold one KV block of" in said(demo_model_path, host_cache_bytes=5)
    large = {"block_size": 1024, "kv_cache_bytes": 1 << 20}
    assert said(demo_model_path, **large).startswith("kv_cache_bytes=1048576 cannot hold one KV block of")
    assert "this machine has" in said(demo_model_path, engine="torch", kv_cache_bytes=1 << 50)
    (tmp_path / "file").touch()
    disk = {"disk_cache_bytes": 1 << 20, "disk_cache_dir": tmp_path / "file" / "disk"}
    assert "is no directory that this user may write to" in said(demo_model_path, **disk)
    disk = {"disk_cache_bytes": 1 << 60, "disk_cache_dir": tmp_path}
    assert "GiB, and the disk of" in said(demo_model_path, **disk)
    for wrong in (tmp_path, tmp_path / "none" / "usage.sqlite"):
        assert "is no file that this user may write" in said(demo_model_path, usage_file=wrong)
    monkeypatch.setattr(preflight, "_CGROUP_MEMORY", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert "this machine has 0.0 GiB" in said(demo_model_path, engine="torch")


def test_a_model_that_is_none(demo_model_path: Path, tmp_path: Path) -> None:
    """No directory; more positions than it has."""
    assert "is neither a built-in model" in said(tmp_path / "none")
    assert "more than the 32768 positions" in said(demo_model_path, max_model_len=40000)


@pytest.fixture(scope="module")
def changed(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a copy of a checkpoint with another config."""

    def make(**fields: Any) -> Path:
        path = tmp_path_factory.mktemp("models") / "changed"
        shutil.copytree(demo_model_path, path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **fields}))
        return path

    return make


def test_an_architecture_that_is_not_served(changed: Callable[..., Path]) -> None:
    """Another model's config, and layers that the engine does not compute; all of it without the weights."""
    other = changed(model_type="gpt2", n_positions=1024)
    assert "names the model_type 'gpt2' and the architecture 'Qwen3ForCausalLM'" in said(other, engine="torch")
    layers = ["full_attention", "sliding_attention"] * 2
    sliding = changed(layer_types=layers, sliding_window=64, use_sliding_window=True)
    assert said(sliding, engine="torch") == "qwen3: layers of type sliding_attention"


def test_what_vllm_cannot_do(changed: Callable[..., Path]) -> None:
    """Settings without effect, and a model whose prefixes are never held whole; windows in some layers are fine."""
    everywhere = changed(layer_types=["sliding_attention"], sliding_window=64)
    assert "more than 64 tokens back" in said(everywhere, engine="vllm")
    somewhere = changed(layer_types=["sliding_attention", "full_attention"])
    assert said(somewhere, engine="vllm", admission="worst_case").startswith("admission: with engine=vllm")


def test_what_is_on_other_machines_is_not_missed(tmp_path: Path) -> None:
    """A file for a cluster names what only its nodes have; but a mistake that can be seen here is one."""
    values = {"model": "/models/llama", "secret_file": "/run/secret", "lora_adapters": {"a": "/adapters/a"}}
    assert problems(AppConfig.model_validate(values), elsewhere=True).sentences == ()
    assert not (tmp_path / "state").exists()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0o600)
    found = problems(AppConfig.model_validate({**values, "secret_file": tmp_path / "secret"}), elsewhere=True)
    assert len(found.sentences) == 1
