"""A file of whole lines that only grows, and is rotated by size: FILE, FILE.1, FILE.2 ...

Each begins with a header. One writer has it. What cannot be written whole is not in it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG

_LOOK_BYTES = 1 << 18
_MARK = b'"input_length"'
"""What is in each line of a request, and in no other."""

WriteCall = Callable[[int, bytes], int]


class LogFile:
    """The file at ``path``, opened by the first write. ``header``: returns a file's first line.

    ``keep``: the number of rotated files. ``write``: as ``os.write``.
    """

    def __init__(
        self, path: Path, max_bytes: int, keep: int, header: Callable[[], bytes], write: WriteCall = os.write
    ) -> None:
        self.path = path
        self._max_bytes, self._keep = max_bytes, keep
        self._header, self._os_write = header, write
        self._fd: int | None = None
        self._inode = 0
        self._bytes = self._header_bytes = 0

    def write(self, lines: bytes) -> None:
        """Append whole lines with one call, so that a kill leaves a part of the last one at most. Raises OSError.

        After an error the file ends as before.
        """
        if self._fd is not None and not self._is_ours():  # moved away, or deleted
            self.close()
        if self._fd is not None and self._bytes > self._header_bytes and self._bytes + len(lines) > self._max_bytes:
            self.close()
            self._set_aside()
        self._append(self._open() if self._fd is None else self._fd, lines)

    def open(self) -> None:
        """Open the file, with its header. Raises OSError."""
        if self._fd is None:
            self._open()

    def close(self) -> None:
        """Close the file; a later write begins a new one."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        with suppress(FileNotFoundError):
            if _has_requests(self.path):
                self._set_aside()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A pipe without a reader would wait for one. A link's owner may be another user.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self.path, flags, 0o600)
        try:
            found = os.fstat(fd)
            if not S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, 0)
            self._bytes, self._inode = 0, found.st_ino
            self._append(fd, self._header())
        except OSError:
            os.close(fd)
            raise
        self._header_bytes, self._fd = self._bytes, fd
        return fd

    def _append(self, fd: int, data: bytes) -> None:
        done = 0
        try:
            while done < len(data):  # a full disk takes a part, and then tells why
                done += self._os_write(fd, data[done:] if done else data)
        except OSError:
            try:
                os.ftruncate(fd, self._bytes)
            except OSError:  # the next line would join a cut one
                self.close()
            raise
        self._bytes += done

    def _is_ours(self) -> bool:
        try:
            return self.path.stat().st_ino == self._inode
        except FileNotFoundError:
            return False

    def _set_aside(self) -> None:
        """Rotate: the file becomes FILE.1, and the oldest one goes."""
        for number in range(self._keep - 1, 0, -1):
            with suppress(FileNotFoundError):
                self._rotated(number).replace(self._rotated(number + 1))
        if self._keep:
            self.path.replace(self._rotated(1))
        else:
            self.path.unlink()

    def _rotated(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


def _has_requests(path: Path) -> bool:
    """Return whether a file would be missed. Anything but a regular file is not read."""
    if not S_ISREG(path.lstat().st_mode):
        return False
    with path.open("rb") as file:
        return _MARK in file.read(_LOOK_BYTES)
