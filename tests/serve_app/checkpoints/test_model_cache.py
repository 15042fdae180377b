"""A model in the cache is whole or not there, whatever became of the process that made it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.checkpoints.checkpoint import CheckpointError
from serve_app.checkpoints.model_cache import ensure_made

_KILLED = """
import sys, time
from pathlib import Path
from serve_app.checkpoints.model_cache import ensure_made
def half(directory):
    (directory / "config.json").write_text("{")
    print("half made", flush=True)
    time.sleep(3600)
ensure_made(Path(sys.argv[1]), half)
"""


def whole(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    """The reason comes through, and the next call makes it."""

    def broken(directory: Path) -> None:
        whole(directory)
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        ensure_made(tmp_path / "model", broken)
    assert list(tmp_path.iterdir()) == []
    assert (ensure_made(tmp_path / "model", whole) / "config.json").read_text() == "{}"


@pytest.mark.parametrize("made", ["cache", "model"])
def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path, made: str) -> None:
    """Whatever is in its way: here a file where a directory belongs, and a device that is full."""

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if made == "cache":
        (tmp_path / "cache").write_text("")
    with pytest.raises(CheckpointError, match=r"demo cannot be put into the model cache: .* XDG_CACHE_HOME") as refused:
        ensure_made(tmp_path / "cache" / "demo", full)
    assert "\n" not in str(refused.value)


def test_a_killed_maker_leaves_nothing_half_and_is_cleaned_up_after(tmp_path: Path) -> None:
    """SIGKILL in the middle: there is no such model, and the next one that is made takes the remains away."""
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "model")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as maker:
        assert maker.stdout is not None and maker.stdout.readline() == "half made\n"
        maker.send_signal(signal.SIGKILL)
    assert not (tmp_path / "model").exists() and len(list(tmp_path.iterdir())) == 1
    assert (ensure_made(tmp_path / "model", whole) / "config.json").read_text() == "{}"
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]
