"""The kinds of model names, the name of a model after resolution, and the requests to the hub and its refusals."""

import re
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from serve_app.checkpoints.checkpoint import CheckpointError, load_checkpoint_info
from serve_app.checkpoints.sources import resolve
from serve_app.checkpoints.sources.model_config import model_config
from serve_app.checkpoints.sources.resolve import resolve_model, with_local_model
from serve_app.config.app import AppConfig


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
    monkeypatch.setattr(resolve, "ensure_snapshot", lambda model_id, revision: tmp_path / str(revision))
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

    def snapshot(model_id: str, *, revision: str | None, allow_patterns: Any, ignore_patterns: Any) -> str:
        asked.append((model_id, revision))
        files = [path.name for path in demo_model_path.iterdir()] + ["merges.txt", "tokenizer.model"]
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        assert list(filter_repo_objects([*files, *OTHER_FORMATS], **patterns)) == files
        return str(demo_model_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert load_checkpoint_info(resolve_model("org/open", "v1")).path == demo_model_path
    assert resolve_model("org/open") == demo_model_path
    assert asked == [("org/open", "v1"), ("org/open", None)]
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name, revision: str(demo_model_path / name))
    assert model_config("org/open")["hidden_size"] == 256
    assert len(asked) == 2


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
