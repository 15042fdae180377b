"""`warmpath infer`: answer OpenAI's batch file without a server, into a file of responses."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from serve_app.cli.console import console, fail
from serve_app.config.files import load_settings
from serve_app.errors import InvalidRequest


def infer(
    input_file: Annotated[Path, typer.Option(help="OpenAI's batch file: one request per line (docs/how-to/batch.md)")],
    output_file: Annotated[Path, typer.Option(help="file for the responses, one per line, in the order of completion")],
    model: Annotated[str | None, typer.Option(help="a model as for `warmpath serve`")] = None,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit of a hub id")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML or JSON file of settings")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, a setting of `warmpath settings`; repeatable")
    ] = None,
) -> None:
    """Answer a file of requests in this process, without a server; exits with 1 if one failed."""
    # These imports take seconds, which `warmpath --help` should not need.
    from serve_app.batch.batch_file import read_batch_file
    from serve_app.batch.run import run_batch
    from serve_app.checkpoints.sources import load_served_model, with_local_model

    logger = logging.getLogger("serve_app")
    logger.handlers, logger.propagate = [RichHandler(console=console, show_path=False, show_time=False)], False
    try:
        requests = read_batch_file(input_file)
    except (OSError, InvalidRequest) as error:
        fail(f"{input_file}: {error}")
    responses: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        settings = load_settings(config, setting or [], model=model, revision=revision, replicas=1, tenants=[])
        settings = with_local_model(settings, console.print)
        info = load_served_model(settings)
        with (
            output_file.open("w") as output,
            Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
        ):
            bar = progress.add_task(settings.model_name, total=len(requests))

            def write(line: dict[str, Any]) -> None:
                print(json.dumps(line, ensure_ascii=False), file=output, flush=True)
                responses.append(line)
                progress.advance(bar)

            asyncio.run(run_batch(settings, info, requests, write))
    except (OSError, ValueError) as error:
        fail(str(error))
    bodies = [line["response"]["body"] for line in responses]
    usages = [body["usage"] for body in bodies if "usage" in body]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    computed = sum(usage["prompt_tokens"] for usage in usages) - cached
    console.print(
        f"{len(usages)} of {len(bodies)} requests answered; prompt tokens: {cached} reused, {computed} computed"
    )
    for line, body in zip(responses, bodies, strict=True):
        if "error" in body:
            failure = f"failed: {line['custom_id']}: {body['error']['message']}"
            console.print(failure, style="red", soft_wrap=True)
    if len(usages) < len(bodies):
        raise typer.Exit(1)
