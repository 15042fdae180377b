"""`warmpath infer`: a batch file in, a file of answers out, without a server."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.logging import RichHandler
from rich.progress import Progress

from serve_app.cli.console import console, fail
from serve_app.config.files import load_settings
from serve_app.errors import InvalidRequest

if TYPE_CHECKING:
    from serve_app.batch.input_file import BatchFile
    from serve_app.batch.run import BatchResult
    from serve_app.config.app import AppConfig


def infer(
    input_file: Annotated[Path, typer.Option(help="TensorRT Edge-LLM's batch file (docs/batch.md)")],
    output_file: Annotated[Path, typer.Option(help="where the answers go, as JSON")],
    profile_output_file: Annotated[
        Path | None, typer.Option(help="where figures of prefill and generation go, as JSON")
    ] = None,
    debug: Annotated[bool, typer.Option(help="tell what was saved and what was reused")] = False,
    model: Annotated[str | None, typer.Option(help="as `warmpath serve` takes it")] = None,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit of a hub id")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML or JSON file of settings")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, any of `warmpath settings`; repeatable")
    ] = None,
) -> None:
    """Answer a file of requests in this process, without a server; leaves with 1 where one failed."""
    # Seconds of imports, which `warmpath --help` need not wait for.
    from serve_app.batch.input_file import read_batch_file

    logger = logging.getLogger("serve_app")
    logger.handlers = [RichHandler(console=console, show_path=False, show_time=False)]
    logger.propagate = False
    logging.getLogger("serve_app.batch").setLevel(logging.DEBUG if debug else logging.WARNING)
    try:
        batch = read_batch_file(input_file)
    except (OSError, InvalidRequest) as error:
        where = f"{error.param}: " if isinstance(error, InvalidRequest) and error.param else ""
        fail(f"{input_file}: {where}{error}")
    for name in batch.unread:
        console.print(f"warning: {input_file}: nothing reads {name}", style="yellow", markup=False, soft_wrap=True)
    own: dict[str, Any] = {"replicas": 1, "tenants": []}
    if batch.adapters:
        own["lora_adapters"] = {name: str(path) for name, path in batch.adapters.items()}
    try:
        settings = load_settings(config, setting or [], model=model, revision=revision, **own)
        result = _run(settings, batch)
        _write(output_file, {"input_file": str(input_file), "responses": result.responses})
        if profile_output_file is not None:
            _write(profile_output_file, result.profile)
    except (OSError, ValueError) as error:
        fail(str(error))
    prefill = result.profile["prefill"]
    console.print(
        f"{len(result.responses) - len(result.errors)} of {len(result.responses)} requests answered; prompt tokens: "
        f"{prefill['reused_tokens']} reused, {prefill['computed_tokens']} computed"
    )
    for failure in result.errors:
        console.print(f"failed: {failure}", style="red", markup=False, soft_wrap=True)
    if result.errors:
        raise typer.Exit(1)


def _run(settings: AppConfig, batch: BatchFile) -> BatchResult:
    from serve_app.batch.run import run_batch
    from serve_app.checkpoints.drafter import load_served_model
    from serve_app.checkpoints.sources.resolve import with_local_model

    if batch.batch_size > settings.max_num_seqs:
        raise ValueError(f"batch_size {batch.batch_size} is over max_num_seqs={settings.max_num_seqs}; set that higher")
    settings = with_local_model(settings, console.print)
    info = load_served_model(settings)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"loading {settings.model_name}", total=None)

        def begin() -> None:
            progress.update(bar, description="requests", total=len(batch.requests))

        return asyncio.run(run_batch(settings, info, batch, begin, lambda: progress.advance(bar)))


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=4) + "\n")
