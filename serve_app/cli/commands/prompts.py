"""`warmpath prompts`: versions of system prompts, locked to the byte.

The commands here read and write a directory; those of `prompt_cutover` ask a running instance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.commands import prompt_cutover
from serve_app.cli.console import fail
from serve_app.prompts.lock import LOCK, PromptDirectory, PromptError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Versions of system prompts: lock, verify, switch.")
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
