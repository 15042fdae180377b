"""The directory of models that warmpath builds, fetches or converts. A model under its final name is complete."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from serve_app.checkpoints.checkpoint import CheckpointError


def default_cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/warmpath/models``, or ``~/.cache/warmpath/models``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warmpath" / "models"


def ensure_made(target: Path, make: Callable[[Path], None]) -> Path:
    """Return ``target``. If it is missing, ``make`` fills a temporary directory, which is then renamed.

    One process makes it and others wait. Raises as ``make``, and CheckpointError if the directory is not writable.
    """
    try:
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            with _locked(target.parent):
                if not target.is_dir():
                    _make(target, make)
    except OSError as error:
        raise CheckpointError(
            f"{target.name} cannot be put into the model cache: {error}; set XDG_CACHE_HOME to another directory"
        ) from error
    return target


def _make(target: Path, make: Callable[[Path], None]) -> None:
    for leftover in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    making = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        make(making)
        for path in (making, *making.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        making.rename(target)
    finally:
        shutil.rmtree(making, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Wait until no other process makes a model in the directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
