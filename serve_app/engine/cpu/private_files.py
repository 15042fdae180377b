"""Whether what lies in a directory may be run: code that others could have written must not be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

COMPILED = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warmpath" / "compiled"
"""Where compiled code is kept, readable and writable for this user alone."""


def others_may_write(*paths: Path) -> bool:
    """Return whether one of ``paths`` belongs to another user, or is writable for others. Raises OSError."""
    found = [path.stat() for path in paths]
    return any(one.st_uid != os.getuid() or one.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for one in found)
