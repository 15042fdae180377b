"""Where an engine's events are heard: sockets that are files in a directory which only this user can enter.

Token ids of every prompt travel through them. The lock is held while the owner lives: a dead one's files can go.
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
    """Where an engine publishes its events and sends them again, for vLLM's ``KVEventsConfig``."""

    directory: Path
    lock: int | None = field(default=None, compare=False)
    """A file descriptor, open as long as the owner lives."""

    @classmethod
    def create(cls) -> EventEndpoints:
        """Make a directory of mode 0700 for the sockets, and remove those of dead owners; ``remove`` it at the end."""
        _remove_ownerless(Path(tempfile.gettempdir()))
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(directory / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        (directory / f"{_LOCK}.new").rename(directory / _LOCK)  # nobody ever sees it without its lock held
        return cls(directory, lock)

    @property
    def publish(self) -> str:
        """``KVEventsConfig.endpoint``."""
        return f"ipc://{self.directory}/events"

    @property
    def replay(self) -> str:
        """``KVEventsConfig.replay_endpoint``."""
        return f"ipc://{self.directory}/replay"

    def remove(self) -> None:
        """Delete the directory and the sockets in it, once."""
        shutil.rmtree(self.directory, ignore_errors=True)
        if self.lock is not None:
            os.close(self.lock)


def _remove_ownerless(parent: Path) -> None:
    """Remove this user's directories whose lock nobody holds; one without a lock is being made."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if directory.lstat().st_uid == os.getuid():
                with os.fdopen(os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW)) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory, ignore_errors=True)
