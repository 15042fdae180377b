"""`warmpath prompts warm | promote | rollback | status`: an operator's word to a running instance."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from serve_app.cli.client import LOCAL, NotAnswered, Url, ask
from serve_app.cli.console import fail

TIMEOUT_S = 1800.0
"""A long prompt takes its time, on one replica after another."""

Ref = Annotated[str, typer.Argument(help="NAME@VERSION")]
Cold = Annotated[bool, typer.Option(help="switch at once: the version is not computed first")]


def warm(ref: Ref, url: Url = LOCAL) -> None:
    """Compute a version's KV on the replicas that will serve it."""
    _show(_asked(url, "POST", "/warm", {"prompt_ref": ref}))


def promote(ref: Ref, url: Url = LOCAL, cold: Cold = False) -> None:
    """Warm a version, then let the name mean it."""
    _show(_asked(url, "POST", "/promote", {"prompt_ref": ref, "cold": cold}))


def rollback(
    name: Annotated[str, typer.Argument(help="NAME")],
    url: Url = LOCAL,
    cold: Cold = False,
) -> None:
    """Go back to the version before."""
    _show(_asked(url, "POST", "/rollback", {"prompt_ref": name, "cold": cold}))


def status(
    name: Annotated[str | None, typer.Argument(help="NAME; default: all")] = None,
    url: Url = LOCAL,
) -> None:
    """Show what each name means, and the hit rate of each version."""
    for shown in _asked(url, "GET", f"?name={name}" if name else "")["data"]:
        _show(shown)


def _asked(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        return ask(url, method, f"/v1/prompts{path}", body=body, timeout_s=TIMEOUT_S)
    except NotAnswered as error:
        fail(str(error))


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
