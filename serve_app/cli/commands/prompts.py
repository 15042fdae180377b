"""`warmpath prompts`: versions of system prompts, locked to the byte.

The commands here read and write a directory; those of `prompt_cutover` ask a running instance.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.commands import prompt_cutover
from serve_app.cli.console import fail
from serve_app.prompts.lock import LOCK, PromptDirectory, PromptError, first_difference

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Versions of system prompts: lock, compare, switch.")
for command in (
    prompt_cutover.warm, prompt_cutover.promote, prompt_cutover.rollback, prompt_cutover.status,
):  # fmt: skip
    app.command()(command)

Directory = Annotated[Path, typer.Option("--dir", help=f"where the prompts and {LOCK} lie")]


@app.command()
def add(
    ref: Annotated[str, typer.Argument(help="NAME@VERSION")],
    file: Annotated[
        Path | None, typer.Argument(help="its text in UTF-8; default: the file at DIR/NAME/VERSION.txt")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="whose alone it is; default: as its other versions, else everybody's")
    ] = None,
    directory: Directory = Path("prompts"),
) -> None:
    """Lock a version: its bytes are what every client gets, from now on."""
    try:
        lock = PromptDirectory(directory).add(ref, file, tenant)
    except (PromptError, OSError) as error:
        fail(str(error))
    print(f"{lock.ref}  {lock.digest}  {'public' if lock.tenant is None else f'private to {lock.tenant}'}")


@app.command()
def verify(directory: Directory = Path("prompts")) -> None:
    """Compare every prompt with its digest; leaves with 1 where one is not what was locked."""
    try:
        shelf = PromptDirectory(directory)
        problems, locks = shelf.problems(), shelf.locks()
    except (PromptError, OSError) as error:
        fail(str(error))
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(1)
    print(f"{directory}: {len(locks)} prompts, all as they were locked")


@app.command()
def diff(
    first: Annotated[str, typer.Argument(help="NAME@VERSION")],
    second: Annotated[str, typer.Argument(help="NAME@VERSION")],
    directory: Directory = Path("prompts"),
) -> None:
    """Show what differs between two versions, and how much of the KV of the first the second can use."""
    try:
        shelf = PromptDirectory(directory)
        before, after = shelf.text(first), shelf.text(second)
    except (PromptError, OSError) as error:
        fail(str(error))
    lines = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), first, second)
    for line in lines:
        print(line, end="" if line.endswith("\n") else "\n\\ no newline at the end\n")
    size = len(after.encode())
    same = first_difference(before.encode(), after.encode())
    if same == size == len(before.encode()):
        print(f"{first} and {second} are the same {size} bytes")
        return
    print(
        f"the first differing byte is {same}: KV of the first {same} of {size} bytes can be used again, "
        f"the other {size - same} are computed anew"
    )
