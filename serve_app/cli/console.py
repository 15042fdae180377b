"""Where `warmpath` prints what is not its output: standard error."""

from __future__ import annotations

import sys
from typing import NoReturn

from rich.console import Console

console = Console(stderr=True, highlight=False)


def fail(message: str) -> NoReturn:
    """Print an error and leave with status 2."""
    console.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    sys.exit(2)
