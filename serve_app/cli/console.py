"""The console of `warmpath` for messages that are not output: standard error."""

import re
import sys
from typing import Any, NoReturn

from rich.console import Console

console = Console(stderr=True, highlight=False, markup=False, emoji=False)
"""It prints texts of others, such as names of processes and models, as they are."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(value: Any) -> Any:
    """Return received JSON with all control characters in its strings replaced: a terminal would obey them."""
    if isinstance(value, str):
        return _CONTROLS.sub("\ufffd", value)
    if isinstance(value, dict):
        return {harmless(name): harmless(inner) for name, inner in value.items()}
    return [harmless(inner) for inner in value] if isinstance(value, list) else value


def fail(message: str) -> NoReturn:
    """Print an error and exit with status 2."""
    console.print(f"error: {harmless(message)}", style="red", markup=False, emoji=False, soft_wrap=True)
    sys.exit(2)
