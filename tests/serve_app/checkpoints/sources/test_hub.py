"""`--model NAMESPACE/NAME`: which files huggingface_hub is asked for, and a sentence for each of its refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from serve_app.checkpoints.checkpoint import CheckpointError, load_checkpoint_info
from serve_app.checkpoints.sources.model_config import model_config
from serve_app.checkpoints.sources.resolve import resolve_model

NO = httpx.Response(404, request=httpx.Request("GET", "http://127.0.0.1"))
OTHER_FORMATS = ["pytorch_model.bin", "consolidated.safetensors", "onnx/model.json", "model.gguf", "README.md"]


def test_a_snapshot_is_what_serving_needs(demo_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one commit, without other formats of the same weights; a config alone is fetched without any."""
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
        (
            errors.RepositoryNotFoundError("no", response=NO),
            "the hub has no model org/x, or it is private and needs",
        ),
        (errors.LocalEntryNotFoundError("no"), "org/x at revision v9 is not in the hub's cache (HF_HOME), and the hub"),
        (OSError("no\nroute"), "org/x at revision v9 cannot be fetched from the hub: no"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_each_refusal_is_one_sentence_that_says_what_to_do(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=re.escape(told)) as caught:
        resolve_model("org/x", "v9")
    assert "\n" not in str(caught.value)
