"""`warmpath prompts`: versions of system prompts. Keys come from the environment: a command line would show them."""

import os
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from serve_app.cli.console import fail, harmless
from serve_app.prompts.lock import LOCK, PromptDirectory, PromptError

OPERATOR_KEY = "WARMPATH_OPERATOR_KEY"
TENANT_KEY = "WARMPATH_API_KEY"
LOCAL = "http://127.0.0.1:8000"
TIMEOUT_S = 1800.0
"""A long prompt takes its time, on one replica after another."""

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Versions of system prompts: lock, verify, switch.")

Ref = Annotated[str, typer.Argument(help="NAME@VERSION")]
Directory = Annotated[Path, typer.Option("--dir", help=f"where the prompts and {LOCK} lie")]
Cold = Annotated[bool, typer.Option(help="switch at once: the version is not computed first")]
Url = Annotated[
    str, typer.Option(help=f"of the instance; an operator's key is taken from ${OPERATOR_KEY}, else ${TENANT_KEY}")
]


@app.command()
def warm(ref: Ref, url: Url = LOCAL) -> None:
    """Compute a version's KV on the replicas that will serve it."""
    _show(_ask(url, "POST", "/warm", {"prompt_ref": ref}))


@app.command()
def promote(ref: Ref, url: Url = LOCAL, cold: Cold = False) -> None:
    """Warm a version, then let the name mean it."""
    _show(_ask(url, "POST", "/promote", {"prompt_ref": ref, "cold": cold}))


@app.command()
def rollback(name: Annotated[str, typer.Argument(help="NAME")], url: Url = LOCAL, cold: Cold = False) -> None:
    """Go back to the version before."""
    _show(_ask(url, "POST", "/rollback", {"prompt_ref": name, "cold": cold}))


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="NAME; default: all")] = None,
    url: Url = LOCAL,
) -> None:
    """Show what each name means, and the hit rate of each version."""
    for shown in _ask(url, "GET", f"?name={name}" if name else "")["data"]:
        _show(shown)


@app.command()
def add(
    ref: Ref,
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


def _ask(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON of an instance's answer, with nothing in it that a terminal obeys; else leave with status 2."""
    key = os.environ.get(OPERATOR_KEY) or os.environ.get(TENANT_KEY)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    whole = f"{url.rstrip('/')}/v1/prompts{path}"
    try:
        answer = httpx.request(method, whole, json=body, headers=headers, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"nobody answers at {url}: {error}")
    try:
        document: dict[str, Any] = harmless(answer.json())
        refusal = document["error"]["message"] if answer.is_error else ""
    except (ValueError, LookupError, TypeError) as error:
        down, other = f"answers with status {answer.status_code}", f"does not answer as warmpath does: {error!r}"
        fail(f"{url} {down if answer.status_code >= 500 else other}")
    if answer.status_code == 401:
        refusal += f" (a key is taken from ${OPERATOR_KEY} or ${TENANT_KEY})"
    if refusal:
        fail(refusal)
    return document


def _show(prompt: dict[str, Any]) -> None:
    before = f", before it {prompt['previous']}" if prompt["previous"] else ""
    owner = f" (private to {prompt['tenant']})" if prompt["tenant"] else ""
    print(f"{prompt['name']}{owner}: {prompt['promoted'] or 'no version'} is promoted{before}")
    for version in prompt["versions"]:
        hit_rate = version["hit_rate"]
        used = "not used yet" if hit_rate is None else f"hit rate {hit_rate:.0%}, {version['cold_requests']} cold"
        print(f"  {version['version']}  {version['tokens']} tokens, {version['requests']} requests: {used}")
    for held in prompt.get("warm", ()):
        print(f"  warm on {len(held['replicas'])} replicas: {', '.join(held['replicas'])}")
