"""`warmpath prompts`: versions of system prompts. Keys are read from the environment: a command line is visible."""

import os
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from serve_app.cli.console import Commands, fail, harmless
from serve_app.prompts.lock import LOCK, PromptDirectory, PromptError

OPERATOR_KEY = "WARMPATH_OPERATOR_KEY"
TENANT_KEY = "WARMPATH_API_KEY"
LOCAL = "http://127.0.0.1:8000"
TIMEOUT_S = 1800.0
"""A long prompt needs time on each replica, one after another."""

app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, help="Versions of system prompts: lock, verify, switch."
)

Ref = Annotated[str, typer.Argument(help="NAME@VERSION")]
PromptsDirectory = Annotated[Path, typer.Option("--dir", help=f"the directory of the prompts and {LOCK}")]
Cold = Annotated[bool, typer.Option(help="switch at once, without computing the version first")]
Url = Annotated[
    str,
    typer.Option(
        envvar="WARMPATH_URL",
        help=f"the instance's URL; the operator's key is read from ${OPERATOR_KEY} or ${TENANT_KEY}",
    ),
]


Model = Annotated[str | None, typer.Option(help="whose prompts, if the instance has several models")]


@app.command()
def warm(ref: Ref, url: Url = LOCAL, model: Model = None) -> None:
    """Compute a version's KV on the replicas that will serve it."""
    _show(_ask(url, "POST", "/warm", model, body={"prompt_ref": ref}))


@app.command()
def promote(ref: Ref, url: Url = LOCAL, cold: Cold = False, model: Model = None) -> None:
    """Warm a version, then switch the name to it."""
    _show(_ask(url, "POST", "/promote", model, body={"prompt_ref": ref, "cold": cold}))


@app.command()
def rollback(
    name: Annotated[str, typer.Argument(help="NAME")], url: Url = LOCAL, cold: Cold = False, model: Model = None
) -> None:
    """Switch the name back to its previous version."""
    _show(_ask(url, "POST", "/rollback", model, body={"prompt_ref": name, "cold": cold}))


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="NAME; default: all")] = None,
    url: Url = LOCAL,
    model: Model = None,
) -> None:
    """Show each name's current version, and the hit rate of each version."""
    for shown in _ask(url, "GET", "", model, name=name)["data"]:
        _show(shown)


@app.command()
def add(
    ref: Ref,
    file: Annotated[
        Path | None, typer.Argument(help="the prompt's text in UTF-8; default: DIR/NAME/VERSION.txt")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="its only tenant; default: that of its other versions, else public")
    ] = None,
    directory: PromptsDirectory = Path("prompts"),
) -> None:
    """Lock a version: from now on, every client gets exactly these bytes."""
    try:
        lock = PromptDirectory(directory).add(ref, file, tenant)
    except (PromptError, OSError) as error:
        fail(str(error))
    print(f"{lock.ref}  {lock.digest}  {'public' if lock.tenant is None else f'private to {lock.tenant}'}")


@app.command()
def verify(directory: PromptsDirectory = Path("prompts")) -> None:
    """Compare every prompt with its digest; exits with 1 if one has changed since it was locked."""
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


def _ask(
    url: str, method: str, path: str, model: str | None, *, name: str | None = None, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the JSON of an instance's answer, safe for a terminal; exit with status 2 on errors."""
    key = os.environ.get(OPERATOR_KEY) or os.environ.get(TENANT_KEY)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    whole = f"{url.rstrip('/')}/v1/prompts{path}"
    try:
        query = {key: value for key, value in (("name", name), ("model", model)) if value is not None}
        answer = httpx.request(method, whole, params=query, json=body, headers=headers, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"no server answers at {url}: {error}; name another by --url or $WARMPATH_URL")
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
    before = f"; the one before was {prompt['previous']}" if prompt["previous"] else ""
    owner = f" (private to {prompt['tenant']})" if prompt["tenant"] else ""
    print(f"{prompt['name']}{owner}: {prompt['promoted'] or 'no version'} is promoted{before}")
    for version in prompt["versions"]:
        hit_rate = version["hit_rate"]
        used = "not used yet" if hit_rate is None else f"hit rate {hit_rate:.0%}, {version['cold_requests']} cold"
        print(f"  {version['version']}  {version['tokens']} tokens, {version['requests']} requests: {used}")
    for held in prompt.get("warm", ()):
        print(f"  warm on {len(held['replicas'])} replicas: {', '.join(held['replicas'])}")
