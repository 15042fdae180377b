"""A file of whole lines that only grows, and is rotated by size: FILE, FILE.1, FILE.2 ...

Each begins with a header. One writer has it, locked. What cannot be written whole is not in it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG

_LOOK_BYTES = 1 << 18
_OURS = b'{"warmpath_traffic"'
_MARK = b'"input_length"'
"""What is in each line of a request, and in no other."""

WriteCall = Callable[[int, bytes], int]


class LogFile:
    """The file at ``path``, opened by the first write. ``header``: returns a file's first line.

    ``keep``: the number of rotated files. ``write``: as ``os.write``. ``beside``: the path of the next file while
    another writer, such as an ingress that ends, has ``path``; default: that is an error.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        keep: int,
        header: Callable[[], bytes],
        write: WriteCall = os.write,
        beside: Path | None = None,
    ) -> None:
        self.path = path
        self._paths = [path] if beside is None or beside == path else [path, beside]
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
            self._set_aside(self.path)
            self.close()  # it was locked until then
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
        fd = None
        for path in self._paths:
            if fd is None:
                self.path, fd = path, self._emptied(path)
        if fd is None:
            raise OSError(errno.EBUSY, "another process writes it")
        try:
            os.fchmod(fd, 0o600)
            self._bytes, self._inode = 0, os.fstat(fd).st_ino
            self._append(fd, self._header())
        except OSError:
            os.close(fd)
            raise
        self._header_bytes, self._fd = self._bytes, fd
        return fd

    def _emptied(self, path: Path) -> int | None:
        """Return the locked, empty file at a path, whose requests are set aside; None if another writer has it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # A pipe without a reader would wait for one. A link's owner may be another user.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        while True:
            fd = os.open(path, flags, 0o600)
            try:
                if not _is_locked(fd):
                    os.close(fd)
                    return None
                if os.path.samestat(os.fstat(fd), path.stat()):  # else its writer has just set it aside
                    if not _has_requests(fd):
                        os.ftruncate(fd, 0)
                        return fd
                    self._set_aside(path)
            except FileNotFoundError:
                pass
            except OSError:
                os.close(fd)
                raise
            os.close(fd)

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

    def _set_aside(self, path: Path) -> None:
        """Rotate: the file becomes FILE.1, and the oldest one goes."""

        def rotated(number: int) -> Path:
            return path.with_name(f"{path.name}.{number}")

        for number in range(self._keep - 1, 0, -1):
            with suppress(FileNotFoundError):
                rotated(number).replace(rotated(number + 1))
        if self._keep:
            path.replace(rotated(1))
        else:
            path.unlink()


def _is_locked(fd: int) -> bool:
    """Lock a file until it is closed; return whether no other writer has it. Raises OSError."""
    if not S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have no locks
        pass
    return True


def _has_requests(fd: int) -> bool:
    """Return whether a file would be missed. Raises OSError if it is none of ours."""
    begin = os.pread(fd, _LOOK_BYTES, 0)
    if begin and not begin.startswith(_OURS[: len(begin)]):
        raise OSError(errno.EEXIST, "it holds something else than recorded traffic")
    return _MARK in begin
