"""`warmpath prompts`: versions of system prompts. Keys are read from the environment: a command line is visible."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serve_app.cli.admin_client import LOCAL, Url, ask
from serve_app.cli.console import Commands, fail, harmless
from serve_app.errors import unread

if TYPE_CHECKING:
    from serve_app.cache_misses.lint import LintReport, Tokens

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    help="Versions of system prompts: lint, lock, verify, switch.",
)

Ref = Annotated[str, typer.Argument(help="NAME@VERSION")]
PromptsDirectory = Annotated[Path, typer.Option("--dir", help="the directory of the prompts and prompts.lock")]
Cold = Annotated[bool, typer.Option(help="switch at once, without computing the version first")]


class OutputFormat(StrEnum):
    """Forms of a report."""

    text = "text"
    json = "json"


ModelOption = Annotated[str | None, typer.Option(help="whose prompts, if the instance has several models")]


@app.command()
def warm(ref: Ref, url: Url = LOCAL, model: ModelOption = None) -> None:
    """Compute a version's KV on the replicas that will serve it."""
    _show(_ask(url, "POST", "/warm", model, body={"prompt_ref": ref}))


@app.command()
def promote(ref: Ref, url: Url = LOCAL, cold: Cold = False, model: ModelOption = None) -> None:
    """Warm a version, then switch the name to it."""
    _show(_ask(url, "POST", "/promote", model, body={"prompt_ref": ref, "cold": cold}))


@app.command()
def cutover(
    ref: Ref,
    to: Annotated[
        float | None, typer.Option(help="percent of the conversations that get the version; 100: all", min=0, max=100)
    ] = None,
    back: Annotated[bool, typer.Option("--back", help="give all of them the promoted version again")] = False,
    url: Url = LOCAL,
    cold: Cold = False,
    model: ModelOption = None,
) -> None:
    """Warm a version, then switch a part of the conversations to it. One conversation always gets the same version."""
    if back == (to is not None):
        fail("give --to PERCENT, or --back")
    _show(_ask(url, "POST", "/cutover", model, body={"prompt_ref": ref, "percent": to or 0, "cold": cold}))


@app.command()
def rollback(
    name: Annotated[str, typer.Argument(help="NAME")], url: Url = LOCAL, cold: Cold = False, model: ModelOption = None
) -> None:
    """End a cut-over in part; else switch the name back to its previous version."""
    _show(_ask(url, "POST", "/rollback", model, body={"prompt_ref": name, "cold": cold}))


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="NAME; default: all")] = None,
    url: Url = LOCAL,
    model: ModelOption = None,
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
    from serve_app.prompts.lock import PromptDirectory, PromptError

    try:
        lock = PromptDirectory(directory).add(ref, file, tenant)
    except PromptError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: {unread(error)}")
    print(f"{lock.ref}  {lock.digest}  {'public' if lock.tenant is None else f'private to {lock.tenant}'}")


@app.command()
def verify(directory: PromptsDirectory = Path("prompts")) -> None:
    """Compare every prompt with its digest; exits with 1 if one has changed since it was locked."""
    from serve_app.prompts.lock import PromptDirectory, PromptError

    try:
        shelf = PromptDirectory(directory)
        problems, locks = shelf.problems(), shelf.locks()
    except PromptError as error:
        fail(str(error))
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(1)
    print(f"{directory}: {len(locks)} prompts, all as they were locked")


@app.command()
def lint(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="prompts, templates, folders of them, requests as JSON or lines, logs, files of traffic_log; "
            "- for standard input"
        ),
    ],
    constant: Annotated[
        list[str] | None, typer.Option(help="a template's placeholder that is the same in all requests; repeatable")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="count by this model's tokenizer, named as for `warmpath serve`; default: about")
    ] = None,
    output: Annotated[OutputFormat, typer.Option("--format", help="text or json")] = OutputFormat.text,
) -> None:
    """Find what keeps prompts out of the cache, before a deploy: what changes, standing before what stays.

    Exits with 1 if there is any. Recorded traffic has no text: it tells where prompts leave earlier ones.
    """
    # numpy and tokenizers take longer to import than all other commands to run.
    from serve_app.cache_misses.lint import Linter, RoughTokens
    from serve_app.errors import InvalidRequest
    from serve_app.traffic.breaks import is_recording

    recordings = [file for file in files if str(file) != "-" and file.is_file() and is_recording(file)]
    if recordings:
        if len(recordings) < len(files):
            fail(f"{recordings[0]} is recorded traffic, which has no text: give it without other files")
        _print_breaks(recordings, output)
        return
    try:
        report = Linter(RoughTokens() if model is None else _tokens_of(model), constant or ()).read(files)
    except InvalidRequest as error:
        fail(error.message)
    if output is OutputFormat.json:
        findings = [finding.shown() for finding in report.findings]
        told = {
            name: getattr(report, name) for name in ("prompts", "prompt_tokens", "lost_tokens", "notes", "unlisted")
        }
        print(json.dumps({"findings": findings, **told, "exact": model is not None}, ensure_ascii=False, indent=2))
    else:
        _print_findings(report, "" if model is not None else "about ")
    if report.findings:
        raise typer.Exit(1)


def _print_breaks(files: list[Path], output: OutputFormat) -> None:
    """Print where recorded prompts leave earlier ones; exits with 2 if the files cannot be read."""
    from dataclasses import asdict

    from serve_app.request_files import TraceError
    from serve_app.traffic.breaks import prompt_breaks
    from serve_app.traffic.reader import read_traffic
    from serve_app.traffic.workload import shared_tokens

    try:
        workload = read_traffic(files)
    except TraceError as error:
        fail(str(error))
    breaks = prompt_breaks(workload)
    tokens, known = (
        int(workload.prompt_tokens.sum(dtype="int64")),
        int(shared_tokens(workload.paths, workload.path_start, workload.sizes, workload.block_tokens).sum()),
    )
    if output is OutputFormat.json:
        told = {"prompts": len(workload), "prompt_tokens": tokens, "known_tokens": known}
        shown = {**told, "breaks": [asdict(one) for one in breaks], "notes": list(workload.warnings)}
        print(json.dumps(shown, ensure_ascii=False, indent=2))
        return
    for one in breaks:
        place = f"after {one.tokens:,} tokens" if one.tokens else "at their first block"
        left = f"{one.prompts:,} prompts leave all earlier ones {place}"
        print(harmless(f"{one.model}, tenant {one.tenant}: {left}; {one.lost_tokens:,} tokens behind it are new."))
    for warning in workload.warnings:
        print(f"note: {harmless(warning)}")
    print(f"{len(workload):,} prompts, {known / max(1, tokens):.1%} of {tokens:,} tokens seen before.")
    print("A recording has no text: what changes there is found in the requests themselves.")


def _tokens_of(model: str) -> "Tokens":
    """Return the tokenizer of a model, or exit with 2."""
    from serve_app.cache_misses.lint import ModelTokens
    from serve_app.checkpoints.checkpoint import CheckpointError
    from serve_app.checkpoints.sources import resolve_model

    try:
        return ModelTokens(resolve_model(model, weights=False))
    except (CheckpointError, OSError, ValueError) as error:
        fail(str(error))


def _print_findings(report: "LintReport", about: str) -> None:
    from serve_app.cache_misses.rules import REMEDIES

    for one in report.findings:
        place = f"{one.part}, line {one.part_line}: " if one.part else ""
        found = f"{one.found!r}: " if one.found else ""
        many = f", in each of {len(one.lost):,} requests" if len(one.lost) > 1 else ""
        again = "were computed again" if one.seen else "will be computed again"
        cost = f"{about}{one.lost_tokens:,} tokens behind it {again}{many}"
        print(harmless(f"{one.path}:{one.line}: {place}{found}{one.what}; {cost}. {REMEDIES[one.reason]}"))
    for note in report.notes:
        print(harmless(f"note: {note}"))
    more = f", and {report.unlisted:,} more" if report.unlisted else ""
    share = f", {report.lost_tokens / report.prompt_tokens:.0%} of all" if report.prompt_tokens else ""
    lost = f": {about}{report.lost_tokens:,} tokens lost{share}" if report.findings else ""
    print(f"prompts: {report.prompts:,}; findings: {len(report.findings):,}{more}{lost}")


def _ask(
    url: str, method: str, path: str, model: str | None, *, name: str | None = None, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    return ask(url, method, f"/v1/prompts{path}", query={"name": name, "model": model}, body=body)


def _show(prompt: dict[str, Any]) -> None:
    before = f"; the one before was {prompt['previous']}" if prompt["previous"] else ""
    owner = f" (private to {prompt['tenant']})" if prompt["tenant"] else ""
    part = f"; {prompt['percent']:g} % of conversations get {prompt['coming']}" if prompt.get("coming") else ""
    print(f"{prompt['name']}{owner}: {prompt['promoted'] or 'no version'} is promoted{before}{part}")
    for version in prompt["versions"]:
        hit_rate = version["hit_rate"]
        used = "not used yet" if hit_rate is None else f"hit rate {hit_rate:.0%}, {version['cold_requests']} cold"
        if version.get("ttft_p50_s") is not None:
            used += f", TTFT p50 {version['ttft_p50_s'] * 1000:,.0f} ms, p95 {version['ttft_p95_s'] * 1000:,.0f} ms"
        print(f"  {version['version']}  {version['tokens']} tokens, {version['requests']} requests: {used}")
        if version.get("advice"):
            print(f"    {version['advice']}")
    for held in prompt.get("warm", ()):
        number = len(held["replicas"])
        print(f"  warm on {number} replica{'s' if number > 1 else ''}: {', '.join(held['replicas'])}")
