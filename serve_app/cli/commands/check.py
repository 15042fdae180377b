"""`warmpath doctor` and `warmpath check`: problems of this machine, or of a configuration, with advice."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serve_app.cli.console import fail
from serve_app.errors import unread

if TYPE_CHECKING:
    from serve_app.cli.checks.run import CheckNeed


def doctor(
    port: Annotated[int, typer.Option(help="the instance's HTTP port")] = 8000,
    host: Annotated[str, typer.Option(help="the instance's HTTP address")] = "127.0.0.1",
    model: Annotated[Path | None, typer.Option(help="a checkpoint, whose chat template is looked at, too")] = None,
    config: Annotated[
        Path | None, typer.Option(help="a settings file: what each of its models needs is looked at, too")
    ] = None,
    worker: Annotated[list[str] | None, typer.Option(help="a server of `engine: remote`; repeatable")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Check the installation, the port, memory, disks and torch's device; exits with 1 if there is a problem.

    It starts and changes nothing. Your own running instance is no problem.
    """
    from serve_app.cli.checks.finding import Finding, Look
    from serve_app.cli.checks.run import OF_MODELS, findings
    from serve_app.config.files import load_settings

    shown: list[Finding] = []
    flags: dict[str, Any] = {"engine": "remote", "workers": worker} if worker else {}
    needs: list[CheckNeed] = ["installation", "port", "machine", "database", "workers"]
    if model is not None:
        flags["model"] = str(model.resolve())
        needs.append("template")
    if config is not None:
        needs += [need for need in OF_MODELS if need not in needs]
    try:
        settings = load_settings(config, (), **flags)
    except ValueError as error:
        fail(str(error))
    look = Look("here", settings, (host, port))
    for finding in findings(look, *needs):
        shown.append(finding)
        if not as_json:
            print(finding.told())
    if model is not None and all(finding.subject != "chat template" for finding in shown):
        shown.append(Finding("chat template", "it takes every conversation"))
        if not as_json:
            print(shown[-1].told())
    wrong = sum(finding.state == "problem" for finding in shown)
    if as_json:
        names = ("subject", "state", "found", "advice")
        rows = [{name: getattr(finding, name) for name in names} for finding in shown]
        print(json.dumps({"ok": not wrong, "findings": rows}, indent=2))
    else:
        print(f"{wrong} problem{'s' if wrong > 1 else ''}" if wrong else "nothing is in the way")
    raise typer.Exit(1 if wrong else 0)


def check(
    file: Annotated[Path, typer.Argument(help="a Serve config, a KubeRay RayService, or a settings file")],
    elsewhere: Annotated[
        bool, typer.Option(help="the instance runs on other machines: do not look for files and packages here")
    ] = False,
) -> None:
    """Report the mistakes in a configuration before its deployment; exits with 1 if there are any."""
    from serve_app.cli.checks.file import mistakes_in

    try:
        mistakes = mistakes_in(file.read_text(), file.parent, place_of_run="elsewhere" if elsewhere else "here")
    except (OSError, ValueError) as error:
        fail(f"cannot read {file}: {unread(error)}")
    for mistake in mistakes:
        print(mistake.told(str(file)))
    if any(mistake.state == "problem" for mistake in mistakes):
        raise typer.Exit(1)
    print(f"{file}: nothing is wrong")
