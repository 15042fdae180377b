"""Which kind of name a model's is, and what it is called afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.checkpoints.checkpoint import CheckpointError
from serve_app.checkpoints.sources import resolve
from serve_app.checkpoints.sources.resolve import resolve_model, with_local_model
from serve_app.config.app import AppConfig


def test_a_built_in_name_is_built_and_a_directory_is_taken_as_it_is(
    demo_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory wins over a hub id of the same spelling."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert resolve_model("demo").name == demo_model_path.name
    assert resolve_model(str(demo_model_path)) == demo_model_path
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("models/mine") == tmp_path / "models" / "mine"


@pytest.mark.parametrize(
    ("name", "revision", "sentence"),
    [
        ("nothing", None, "'nothing' is neither a built-in model .smollm2, demo, small. nor a local directory"),
        ("/no/such/model", None, "nor a local directory"),
        ("models/none.gguf", None, "nor a GGUF file that exists"),
        ("demo", "main", "revision=main is for models of a hub"),
    ],
)
def test_what_is_nothing_of_all_that_is_refused(name: str, revision: str | None, sentence: str) -> None:
    """The error says what a model may be."""
    with pytest.raises(CheckpointError, match=sentence):
        resolve_model(name, revision)


def test_what_was_found_is_served_under_the_name_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub id becomes the path of a snapshot, so that replicas of one instance cannot differ; clients see the id."""
    monkeypatch.setattr(resolve, "ensure_snapshot", lambda model_id, revision: tmp_path / str(revision))
    monkeypatch.setattr(resolve, "ensure_converted", lambda gguf: tmp_path / "converted")
    config = with_local_model(AppConfig(model="org/Name-1.5B", revision="v2"), pytest.fail)
    assert (config.model, config.model_name, config.revision) == (str(tmp_path / "v2"), "org/Name-1.5B", None)
    (tmp_path / "tiny.Q4_1.gguf").touch()
    config = with_local_model(AppConfig(model=str(tmp_path / "tiny.Q4_1.gguf")), pytest.fail)
    assert (config.model, config.model_name) == (str(tmp_path / "converted"), "tiny.Q4_1")
    assert with_local_model(AppConfig(model="org/x", served_model_name="x"), pytest.fail).model_name == "x"
