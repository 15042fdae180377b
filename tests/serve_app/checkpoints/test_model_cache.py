"""A model in the cache is whole or absent, even if the process that made it failed or was killed."""

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


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """The reason is reported, a full device as one sentence, and the next call makes the model."""

    def fail_with(error: Exception) -> None:
        def broken(directory: Path) -> None:
            whole(directory)
            raise error

        ensure_made(tmp_path / "demo", broken)

    with pytest.raises(ValueError, match="no weights"):
        fail_with(ValueError("no weights"))
    with pytest.raises(CheckpointError, match=r"demo cannot be put into the model cache: .*full.* XDG_CACHE_HOME"):
        fail_with(OSError(errno.ENOSPC, "full"))
    assert list(tmp_path.iterdir()) == []
    assert (ensure_made(tmp_path / "demo", whole) / "config.json").read_text() == "{}"
    with pytest.raises(CheckpointError, match="XDG_CACHE_HOME"):
        ensure_made(tmp_path / "demo" / "config.json" / "other", whole)


def test_a_killed_maker_leaves_nothing_half_and_is_cleaned_up_after(tmp_path: Path) -> None:
    """After a SIGKILL in the middle the model is absent, and making another model removes the remains."""
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "model")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as maker:
        assert maker.stdout is not None and maker.stdout.readline() == "half made\n"
        maker.send_signal(signal.SIGKILL)
    assert not (tmp_path / "model").exists() and len(list(tmp_path.iterdir())) == 1
    assert (ensure_made(tmp_path / "model", whole) / "config.json").read_text() == "{}"
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]
