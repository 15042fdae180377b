"""`warmpath doctor`: what of this machine and installation would keep an instance from working, and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from serve_app.checkpoints.model_cache import default_cache_dir
from serve_app.cli.console import console
from serve_app.cli.doctor.finding import Finding
from serve_app.cli.doctor.machine import device, room
from serve_app.cli.doctor.models import models
from serve_app.cli.doctor.network import ports, ray_state
from serve_app.cli.doctor.software import software

_SIGNS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}


def doctor(
    port: Annotated[int, typer.Option(help="HTTP port that an instance is to have")] = 8000,
    host: Annotated[str, typer.Option(help="HTTP address that it is to have")] = "127.0.0.1",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Look at installation, devices, ports, Ray, memory, disks and models; leaves with 1 where something is wrong.

    Starts nothing and changes nothing.
    """
    found: list[Finding] = []
    for finding in findings(host, port):
        found.append(finding)
        if not as_json:
            print(f"{_SIGNS[finding.state]}  {finding.subject}: {finding.found}")
            if finding.advice:
                print(f"         -> {finding.advice}")
    wrong = sum(finding.state == "problem" for finding in found)
    if as_json:
        print(json.dumps({"ok": not wrong, "findings": [asdict(finding) for finding in found]}, indent=2))
    else:
        print(f"{wrong} problems" if wrong else "nothing is in the way")
    raise typer.Exit(1 if wrong else 0)


def findings(host: str, port: int) -> Iterator[Finding]:
    """Yield all that is looked at, the quickest first in each room."""
    yield from software()
    yield from ports(host, port)
    yield from ray_state()
    yield from room({"model cache": default_cache_dir()})
    yield models()
    with console.status("asking torch what it computes on"):
        yield device()
