"""Mistakes in settings that can be found before anything starts, one sentence each."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from serve_app.cli.checks import machine
from serve_app.cli.checks.finding import Look, RunPlace
from serve_app.cli.checks.run import CheckNeed, findings
from serve_app.cli.local_ray import held_port
from serve_app.config.app import AppConfig
from serve_app.config.live import BadSettings, app_config
from serve_app.engine.lora.peft_files import CONFIG_FILE, WEIGHTS_FILE
from tests.harness.programs import programs_here


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret is made in a temporary directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("WARMPATH_SECRET", raising=False)
    monkeypatch.delenv("WARMPATH_RESPONSES_URL", raising=False)


def sentences(model: Path | str, place: RunPlace = "start", **settings: Any) -> list[str]:
    config = AppConfig.model_validate({"model": str(model), "engine": "simulated", **settings})
    needs: tuple[CheckNeed, CheckNeed] = ("model", "files") if place == "start" else ("settings", "model")
    found = findings(Look(place, config), *needs)
    return [finding.sentence for finding in found]


def said(model: Path, **settings: Any) -> str:
    (sentence,) = sentences(model, **settings)
    return sentence


def test_good_settings_have_none(demo_model_path: Path, tmp_path: Path) -> None:
    tiers = {"host_cache_bytes": 1 << 20, "disk_cache_bytes": 1 << 20, "disk_cache_dir": tmp_path / "disk"}
    assert sentences(demo_model_path, **tiers) == []
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"disk_cache_bytes": 1000}, "disk_cache_bytes needs disk_cache_dir"),
        ({"object_cache_url": "/mnt/kv"}, "object_cache_url must be a URL, such as"),
        ({"num_blocks": 64, "pin_budget": 64}, "pin_budget=64 leaves nothing of 64 blocks"),
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens must exceed max_num_seqs"),
    ],
)
def test_settings_that_contradict_each_other(values: dict[str, Any], words: str) -> None:
    """This check needs no machine, so every reader of settings makes it."""
    with pytest.raises(BadSettings, match=words):
        app_config(values)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tool_parser": "hermit"}, "tool_parser must be one of auto, hermes, mistral, llama3_json"),
        ({"reasoning_parser": "gwen"}, "reasoning_parser must be one of auto, none, qwen3, deepseek_r1"),
        ({"secret_file": "TMP"}, "(Is a directory)"),
        ({"secret_file": "TMP/open"}, "others may read"),
        ({"host_cache_bytes": 5}, "host_cache_bytes=5 cannot hold one KV block of"),
        ({"block_size": 1024, "kv_cache_bytes": 1 << 20}, "kv_cache_bytes=1048576 cannot hold one KV block of"),
        ({"disk_cache_bytes": 1 << 20, "disk_cache_dir": "TMP/open/disk"}, "is no directory that this user may write"),
        ({"disk_cache_bytes": 1 << 60, "disk_cache_dir": "TMP"}, "GiB, and the disk of"),
        ({"object_cache_url": "s3://bucket/kv"}, "Install s3fs to access S3 in the environment of the replicas"),
        ({"usage_file": "TMP"}, "is no file that this user may write"),
        ({"usage_file": "TMP/none/usage.sqlite"}, "is no file that this user may write"),
        ({"responses_file": "TMP"}, "is no file that this user may write"),
        ({"max_model_len": 40000}, "more than the 32768 positions"),
    ],
)
def test_each_setting_that_cannot_be_used(
    demo_model_path: Path, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    """An unknown format, a secret or place that cannot be read or written, or a budget that does not fit."""
    (tmp_path / "open").write_text("x")
    (tmp_path / "open").chmod(0o644)
    here = {
        name: value.replace("TMP", str(tmp_path)) if isinstance(value, str) else value
        for name, value in settings.items()
    }
    [sentence] = sentences(**{"model": demo_model_path, **here})
    assert words.replace("TMP", str(tmp_path)) in sentence


def test_a_url_of_stored_responses_that_names_no_database(
    demo_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error does not quote the URL, and is omitted if responses are not stored."""
    monkeypatch.setenv("WARMPATH_RESPONSES_URL", "mysql://user:hunter2@host/database")
    told = said(demo_model_path)
    assert "must be redis://HOST" in told and "hunter2" not in told
    assert sentences(demo_model_path, store_responses=False) == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://user:hunter2@127.0.0.1:PORT/database", "Connection refused"),
        ("redis://:hunter2@127.0.0.1:PORT/0", "Connection refused"),
        ("postgresql://user:hunter%zz2@127.0.0.1:PORT/database", "ProgrammingError"),
    ],
)
def test_a_database_that_does_not_answer_is_told_before_a_start(
    monkeypatch: pytest.MonkeyPatch, url: str, words: str
) -> None:
    """Every ingress would refuse everybody until it has read its tenants. The password is never told."""
    with held_port() as port:
        monkeypatch.setenv("WARMPATH_RESPONSES_URL", url.replace("PORT", str(port)))
        [finding] = findings(Look("start", AppConfig()), "database")
    told = "the database of $WARMPATH_RESPONSES_URL does not answer: "
    assert finding.sentence.startswith(told) and words in finding.sentence
    assert finding.state == "problem" and "hunter" not in finding.sentence


def test_more_than_the_machines_memory(demo_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.cli.checks.settings._tried", lambda *_, **__: iter(()))
    assert "this machine has" in said(demo_model_path, engine="torch", kv_cache_bytes=1 << 50)
    monkeypatch.setattr(machine, "_CGROUP_MEMORY", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert "this machine has 0.0 GiB" in said(demo_model_path, engine="torch")


def test_an_adapter_of_too_high_a_rank(demo_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 8}))
    weights = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((8, 4), np.float32)}
    save_file(weights, tmp_path / WEIGHTS_FILE)
    adapter = {"lora_adapters": {"a": tmp_path}}
    assert sentences(demo_model_path, max_lora_rank=8, **adapter) == []
    sentence = said(demo_model_path, max_lora_rank=4, **adapter)
    assert sentence == f"the adapter 'a' of the settings, {tmp_path}: rank 8 is over max_lora_rank 4"
    (tmp_path / WEIGHTS_FILE).write_bytes(b"short")
    assert "not a complete safetensors file" in said(demo_model_path, **adapter)


@pytest.mark.parametrize(
    ("fields", "engine", "words"),
    [
        ({"model_type": "gpt2", "n_positions": 1024}, "torch",
         "names the model_type 'gpt2' and the architecture 'Qwen3ForCausalLM'"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 64, "use_sliding_window": True},
         "torch", "qwen3: layers of type sliding_attention"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 64}, "vllm", "a window of 64 in every layer"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 64},
         "vllm", "kv_pull: with copies vLLM keeps all KV of the layers with a window of 64 tokens"),
    ],
)  # fmt: skip
def test_an_architecture_that_is_not_served(
    demo_model_path: Path, tmp_path: Path, fields: dict[str, Any], engine: str, words: str
) -> None:
    """Another model's config, layers that an engine cannot compute, or at a price, are found without the weights."""
    changed = tmp_path / "changed"
    shutil.copytree(demo_model_path, changed)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**config, **fields}))
    with nullcontext() if "model_type" in fields else programs_here():
        assert words in said(changed, engine=engine, **({"kv_pull": True} if engine == "vllm" else {}))


def test_settings_that_vllm_cannot_follow_are_told_all_at_once() -> None:
    unfollowed = sentences("/no/model", "elsewhere", engine="vllm", host_cache_bytes="1MiB", save_ttl_s=60)
    assert [sentence.partition(":")[0] for sentence in unfollowed] == ["host_cache_bytes", "save_ttl_s"]
