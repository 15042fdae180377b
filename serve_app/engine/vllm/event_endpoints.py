"""Sockets for an engine's events: files in a directory that only this user can enter.

They carry the token ids of every prompt. The owner holds a lock while it lives: a dead owner's files can be removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_PREFIX = "warmpath-vllm-"
_LOCK = "owner"


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """The addresses where an engine publishes and replays its events, for vLLM's ``KVEventsConfig``."""

    directory: Path
    lock: int | None = field(default=None, compare=False)
    """A file descriptor, open while the owner lives."""

    @classmethod
    def create(cls) -> EventEndpoints:
        """Make a directory of mode 0700 for the sockets, and remove those of dead owners; finally call ``remove``."""
        _remove_ownerless(Path(tempfile.gettempdir()))
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(directory / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        (directory / f"{_LOCK}.new").rename(directory / _LOCK)  # the file never appears without its lock held
        return cls(directory, lock)

    # For data-parallel ranks after the first vLLM appends to an address with "inproc" in it, and refuses other files.
    @property
    def publish(self) -> str:
        """``KVEventsConfig.endpoint``."""
        return f"ipc://{self.directory}/inproc-events"

    @property
    def replay(self) -> str:
        """``KVEventsConfig.replay_endpoint``."""
        return f"ipc://{self.directory}/inproc-replay"

    def of_rank(self, rank: int) -> tuple[str, str]:
        """Return ``publish`` and ``replay`` as vLLM changes them for a data-parallel rank."""
        suffix = f"_dp{rank}" if rank else ""
        return f"{self.publish}{suffix}", f"{self.replay}{suffix}"

    def remove(self) -> None:
        """Delete the directory with its sockets, once."""
        shutil.rmtree(self.directory, ignore_errors=True)
        if self.lock is not None:
            os.close(self.lock)


def _remove_ownerless(parent: Path) -> None:
    """Remove this user's directories with an unheld lock; one without a lock is being made."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if directory.lstat().st_uid == os.getuid():
                with os.fdopen(os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW)) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory, ignore_errors=True)
