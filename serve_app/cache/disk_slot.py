"""A private directory for one engine's disk tier.

Owns modes (0700, ours) and the lock that keeps two engines apart. Replicas of one machine share ``disk_cache_dir``:
each takes the first free slot below it, and after a restart finds a slot of the life before. Knows nothing of files.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

MAX_SLOTS = 1024


class DiskTierError(OSError):
    """The directory cannot hold a disk tier; the message says what to do."""


class DiskSlot:
    """An exclusively held directory ``slot-N``; the lock ends with ``release`` or with the process."""

    def __init__(self, directory: Path) -> None:
        """Take a slot. Raises DiskTierError where others could read it, or none is free."""
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise DiskTierError(f"cannot make disk_cache_dir {directory}: {error.strerror}") from error
        for number in range(MAX_SLOTS):
            path = directory / f"slot-{number}"
            _make_private(path)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                continue
            self.path = path
            self._descriptor: int | None = descriptor
            return
        raise DiskTierError(f"all {MAX_SLOTS} slots of {directory} are taken")

    def release(self) -> None:
        """Let another engine have the slot; doing it again changes nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise DiskTierError(f"{path} is not a directory of this user; choose another disk_cache_dir")
        if stat.S_IMODE(found.st_mode) != 0o700:
            path.chmod(0o700)
    except DiskTierError:
        raise
    except OSError as error:
        raise DiskTierError(f"cannot use {path} for the disk tier: {error.strerror}") from error
