"""`warmpath doctor`: find problems of this machine and installation, with advice."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.checks.machine import Finding, address, room, torch
from serve_app.cli.checks.settings import template_notes
from serve_app.cli.checks.software import installation, shadows
from serve_app.config.app import AppConfig

_SIGNS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}


def doctor(
    port: Annotated[int, typer.Option(help="the instance's HTTP port")] = 8000,
    host: Annotated[str, typer.Option(help="the instance's HTTP address")] = "127.0.0.1",
    model: Annotated[Path | None, typer.Option(help="a checkpoint, whose chat template is looked at, too")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Check the installation, the port, memory, disks and torch's device; exits with 1 if there is a problem.

    It starts and changes nothing. Your own running instance is no problem.
    """
    shown: list[Finding] = []
    for finding in _findings(host, port, model):
        shown.append(finding)
        if not as_json:
            print(f"{_SIGNS[finding.state]}  {finding.subject}: {finding.found}")
            if finding.advice:
                print(f"         -> {finding.advice}")
    wrong = sum(finding.state == "problem" for finding in shown)
    if as_json:
        names = ("subject", "state", "found", "advice")
        findings = [{name: getattr(finding, name) for name in names} for finding in shown]
        print(json.dumps({"ok": not wrong, "findings": findings}, indent=2))
    else:
        print(f"{wrong} problem{'s' if wrong > 1 else ''}" if wrong else "nothing is in the way")
    raise typer.Exit(1 if wrong else 0)


def _findings(host: str, port: int, model: Path | None) -> Iterator[Finding]:
    yield from installation()
    yield from shadows()
    yield address(host, port, start=False)
    yield from room()
    yield torch()
    if model is not None:
        try:
            notes = list(template_notes(AppConfig(model=str(model.resolve())), "here"))
        except (ValueError, OSError) as error:
            yield Finding("chat template", str(error), "give --model a checkpoint's directory")
        else:
            yield Finding("chat template", "; ".join(notes) or "it takes every conversation")
