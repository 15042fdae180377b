"""The console of `warmpath` for messages that are not output: standard error."""

import re
import sys
from difflib import get_close_matches
from typing import Any, NoReturn

from rich.console import Console
from typer.core import TyperGroup

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


_REMOVED = {
    "top": "the page at / shows it, and `GET /v1/cache/state`",
}


class Commands(TyperGroup):
    """Commands that name the successor of a removed one, and what a mistyped one may mean."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of the arguments, as its base class does, or exit with a remedy."""
        name = args[0] if args else ""
        if name and self.get_command(ctx, name) is None:
            below = ctx.command_path.partition(" ")[2]
            near = get_close_matches(name, self.list_commands(ctx), n=1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(self.list_commands(ctx))}."
            removed = _REMOVED.get(f"{below} {name}".strip())
            ctx.fail(f"There is no command '{name}': " + (f"{removed}." if removed else meant))
        return super().resolve_command(ctx, args)
