"""The lines of a file of recorded requests, gzipped or plain."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from serve_app.errors import unread


class TraceError(ValueError):
    """A trace cannot be used; the message names its file."""


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, gzipped or plain, that are not blank, with their numbers. Raises TraceError."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        where = f" after line {number}" if number else ""
        raise TraceError(f"{path} cannot be read{where}: {unread(error)}") from error
