"""The directory of models that warmpath builds, fetches or converts. A model under its final name is complete."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from errno import ENOSPC
from pathlib import Path

from safetensors import SafetensorError

from serve_app.checkpoints.checkpoint import CheckpointError

MB = 1_000_000


def default_cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/warmpath/models``, or ``~/.cache/warmpath/models``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warmpath" / "models"


def ensure_made(target: Path, make: Callable[[Path], None], needed_bytes: int) -> Path:
    """Return ``target``. If it is missing, ``make`` fills a temporary directory, which is then renamed.

    One process makes it and others wait. ``needed_bytes``: room that it takes, looked for before. Raises as ``make``,
    and CheckpointError if the directory is not writable or too full.
    """
    try:
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            with _locked(target.parent):
                if not target.is_dir():
                    if (free_bytes := shutil.disk_usage(target.parent).free) < needed_bytes:
                        raise _full(target, needed_bytes, f"has {free_bytes / MB:,.0f} MB free")
                    _make(target, make)
    except (OSError, SafetensorError) as error:  # the latter has the system's error in its text alone
        if getattr(error, "errno", 0) == ENOSPC or f"os error {ENOSPC}" in str(error):
            raise _full(target, needed_bytes, "is full") from error
        raise CheckpointError(
            f"{target.name} cannot be put into the model cache: {error}; set XDG_CACHE_HOME to another directory"
        ) from error
    return target


def _full(target: Path, needed_bytes: int, state: str) -> CheckpointError:
    return CheckpointError(
        f"{target.name} needs about {needed_bytes / MB:,.0f} MB in {target.parent}, whose disk "
        f"{state}: free some, or set XDG_CACHE_HOME to a directory on another disk"
    )


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
