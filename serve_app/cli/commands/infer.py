"""`warmpath infer`: answer files of requests, of OpenAI's or TensorRT Edge-LLM's form, into files of responses."""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TextIO

import typer
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from serve_app.cli.console import console, fail, harmless
from serve_app.errors import InvalidRequest, unread

if TYPE_CHECKING:
    from serve_app.batch.batch_file import BatchRequest
    from serve_app.config.app import AppConfig
    from serve_app.infer.answered import AnsweredLine
    from serve_app.infer.edge_file import EdgeFile

logger = logging.getLogger("serve_app")


@dataclass
class _File:
    """An input file, ``edge``: in TensorRT Edge-LLM's form, and its output."""

    path: Path
    output: Path
    requests: "list[BatchRequest]"
    edge: "EdgeFile | None"
    answered: "dict[int, AnsweredLine]" = field(default_factory=dict)
    prefix: str = ""
    """Before what is said of its requests: its name, if there are several."""


def infer(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="requests: OpenAI's batch lines, or TensorRT Edge-LLM's JSON (docs/how-to/batch.md)"),
    ] = None,
    input_file: Annotated[Path | None, typer.Option(help="a file of requests, as the argument")] = None,
    output_file: Annotated[
        Path | None, typer.Option(help="file for the responses of one input; default: NAME.responses.json beside it")
    ] = None,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", help="file for tokens and times of prefill and generation, as JSON")
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="tell hit or miss, reused and computed tokens, and why, by request")
    ] = False,
    keep_order: Annotated[
        bool, typer.Option("--keep-order", help="in the file's order; default: the one that computes least")
    ] = False,
    url: Annotated[
        str | None, typer.Option(envvar="WARMPATH_URL", help="a running server, without /v1; default: in this process")
    ] = None,
    api_key: Annotated[str, typer.Option(envvar="WARMPATH_API_KEY", help="a tenant's key for the server")] = "",
    model: Annotated[
        str | None, typer.Option(help="a model as for `warmpath serve`; with --url, or with several, one of them")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit of a hub id")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML or JSON file of settings")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, a setting of `warmpath settings`; repeatable")
    ] = None,
) -> None:
    """Answer files of requests in this process, without a server, or by one; exits with 1 if a request failed."""
    logger.handlers, logger.propagate = [RichHandler(console=console, show_path=False, show_time=False)], False
    paths = [*(files or ()), *([input_file] if input_file is not None else [])]
    if not paths:
        fail("name a file of requests: warmpath infer FILE")
    if output_file is not None and len(paths) > 1:
        fail("--output-file is for one input; each of several gets a file beside it")
    inputs = [_read(path, output_file) for path in paths]
    for file in inputs[: len(inputs) if len(inputs) > 1 else 0]:
        file.prefix = f"{file.path.name} "
    try:
        with _Results(inputs, debug=debug) as results:
            if url is not None:
                base = url.rstrip("/")
                asyncio.run(_remotely(base, api_key, model, inputs, results.take, keep_order=keep_order, debug=debug))
            else:
                given = model, revision, config, setting or []
                _here(inputs, results.take, *given, keep_order=keep_order, debug=debug)
        _report(inputs, profile_file)
    except OSError as error:
        fail(f"{error.filename}: {unread(error)}" if error.filename else unread(error))
    except ValueError as error:
        fail(str(error))


class _Results:
    """Writes answers into files, beside a progress bar: lines in the order of completion, Edge-LLM's at the end."""

    def __init__(self, files: list[_File], *, debug: bool) -> None:
        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bar = self._progress.add_task("requests", total=sum(len(file.requests) for file in files))
        self._files, self._debug = files, debug
        self._open = ExitStack()
        self._outputs: dict[int, TextIO] = {}

    def __enter__(self) -> Self:
        self._open.enter_context(self._progress)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with self._open:
            for file in self._files if error is None else ():
                if file.edge is not None:
                    responses = file.edge.responses([file.answered[number] for number in range(len(file.requests))])
                    file.output.write_text(json.dumps(responses, ensure_ascii=False, indent=2) + "\n")

    def take(self, at: int, number: int, answered: "AnsweredLine") -> None:
        """Take the answer to a request of the file ``at``."""
        file = self._files[at]
        file.answered[number] = answered
        if file.edge is None:
            if at not in self._outputs:
                self._outputs[at] = self._open.enter_context(file.output.open("w"))
            print(json.dumps(answered.line, ensure_ascii=False), file=self._outputs[at], flush=True)
        if answered.warning:
            logger.warning("%s%s: %s", file.prefix, answered.line["custom_id"], answered.warning)
        if self._debug and answered.ok:
            console.print(harmless(file.prefix + answered.debug_line()), soft_wrap=True)
        self._progress.advance(self._bar)


def _read(path: Path, output: Path | None) -> _File:
    from serve_app.batch.batch_file import read_lines
    from serve_app.infer.edge_file import read_edge_file

    try:
        text = path.read_bytes()
        edge = read_edge_file(path, text)
        requests = read_lines(text) if edge is None else edge.requests
    except (OSError, InvalidRequest) as error:
        fail(f"{path}: {unread(error)}")
    if edge is not None and edge.unread:
        console.print(harmless(f"{path}: unknown fields ignored: {', '.join(edge.unread)}"), soft_wrap=True)
    ending = ".json" if edge is not None else ".jsonl"
    return _File(path, output or path.with_name(f"{path.stem}.responses{ending}"), requests, edge)


Take = Callable[[int, int, "AnsweredLine"], None]


def _here(
    inputs: list[_File],
    take: Take,
    model: str | None,
    revision: str | None,
    config: Path | None,
    setting: list[str],
    *,
    keep_order: bool,
    debug: bool,
) -> None:
    """Answer the files by an engine in this process. Raises ValueError."""
    # These imports take seconds, which `warmpath --help` should not need.
    from serve_app.checkpoints.sources import load_served_model, with_local_model
    from serve_app.config.files import load_settings
    from serve_app.infer.edge_file import DEFAULT_MAX_GENERATE_LENGTH
    from serve_app.infer.run import InferJob, run_batch

    adapters: dict[str, Path] = {}
    for file in inputs:
        for name, path in (file.edge.adapters if file.edge is not None else {}).items():
            if adapters.setdefault(name, path) != path:
                raise ValueError(f"two files give the adapter {name!r} different paths; answer them one by one")
    flags: dict[str, Any] = {"revision": revision, "replicas": 1, "tenants": []}
    settings = load_settings(config, setting, model=model, **flags)
    if settings.models:  # --model names one of them
        settings = load_settings(config, setting, **flags)
    answering = _by_model(settings, model if settings.models else None, inputs)
    for name, numbers in answering.items():
        one = settings.served()[name]
        edge = any(file.edge is not None for file, some in zip(inputs, numbers, strict=True) if some)
        if edge and adapters:
            one = one.model_copy(update={"lora_adapters": {**one.lora_adapters, **adapters}})
        if edge and "default_max_tokens" not in one.model_fields_set:
            one = one.model_copy(update={"default_max_tokens": DEFAULT_MAX_GENERATE_LENGTH})
        one = with_local_model(one, console.print)
        info = load_served_model(one)
        most = min(one.max_num_seqs, one.max_waiting_requests)
        jobs = [
            InferJob(
                [file.requests[number] for number in some],
                most if file.edge is None else min(most, file.edge.batch_size),
                file.edge is not None,
            )
            for file, some in zip(inputs, numbers, strict=True)
        ]
        if settings.models:
            console.print(harmless(f"{name} answers {sum(map(len, numbers))} requests"))

        def tell(at: int, number: int, answered: "AnsweredLine", numbers: list[list[int]] = numbers) -> None:
            take(at, numbers[at][number], answered)

        asyncio.run(run_batch(one, info, jobs, tell, keep_order=keep_order, explains=debug))


def _by_model(settings: "AppConfig", default: str | None, inputs: list[_File]) -> dict[str, list[list[int]]]:
    """Return by served model, in the order of the settings, the numbers of the requests of each file that it answers.

    A request's own `model` chooses; any other goes to ``default``, or to the first one. Aliases become the names that
    they stand for. Raises ValueError.
    """
    served = settings.served()
    owners = {name: name for name in served}
    for name, one in served.items():
        owners |= dict.fromkeys(one.lora_adapters, name)
    first = next(iter(served))
    if default is not None:
        default = settings.aliases.get(default, default)
        if default not in owners:
            raise ValueError(f"--model {default}: the settings have `models`; name one of them: {', '.join(owners)}")
        first = owners[default]
    numbers: dict[str, list[list[int]]] = {name: [[] for _ in inputs] for name in served}
    for at, file in enumerate(inputs):
        for number, request in enumerate(file.requests):
            given = request.body.get("model")
            name = given if isinstance(given, str) else default or first
            name = settings.aliases.get(name, name)
            if isinstance(given, str) or (given is None and name != first):
                request.body["model"] = name
            numbers[owners.get(name, first)][at].append(number)
    return {name: some for name, some in numbers.items() if any(some)}


async def _remotely(
    url: str, api_key: str, model: str | None, inputs: list[_File], take: Take, *, keep_order: bool, debug: bool
) -> None:
    """Answer the files by a running server. Raises ServerUnusable."""
    import httpx

    from serve_app.infer.client import TIMEOUT_S, RemoteBatch, at_once_of, open_server
    from serve_app.infer.edge_file import DEFAULT_MAX_GENERATE_LENGTH
    from serve_app.infer.run import InferJob, run_job

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:
        adapters = {name: path for file in inputs if file.edge is not None for name, path in file.edge.adapters.items()}
        served = await open_server(client, adapters)
        remote = RemoteBatch(client, model or served, explains=debug)
        for at, file in enumerate(inputs):
            if file.edge is not None:
                for request in file.requests:
                    request.body.setdefault("max_tokens", DEFAULT_MAX_GENERATE_LENGTH)

            async def answer(number: int, at: int = at, file: _File = file) -> None:
                take(at, number, await remote.answer(number, file.requests[number]))

            at_once = at_once_of(file.requests) if file.edge is None else file.edge.batch_size
            await run_job(InferJob(file.requests, at_once), answer, keep_order=keep_order)


def _report(inputs: list[_File], profile_file: Path | None) -> None:
    """Write the profile, tell what was reused and what failed; exit with 1 if a request failed."""
    from serve_app.infer.answered import profile
    from serve_app.infer.edge_file import error_of

    answered = [file.answered[number] for file in inputs for number in sorted(file.answered)]
    if profile_file is not None:
        profile_file.write_text(json.dumps(profile(answered), ensure_ascii=False, indent=2) + "\n")
    done = [one for one in answered if one.ok]
    cached = sum(one.cached_tokens for one in done)
    computed = sum(one.prompt_tokens for one in done) - cached
    console.print(
        f"{len(done)} of {len(answered)} requests answered; prompt tokens: {cached} reused, {computed} computed"
    )
    for file in inputs:
        for one in file.answered.values():
            if not one.ok:
                body = one.line["response"]["body"]
                said = error_of(body) if file.edge is not None else body["error"]["message"]
                console.print(
                    harmless(f"failed: {file.prefix}{one.line['custom_id']}: {said}"), style="red", soft_wrap=True
                )
    if len(done) < len(answered):
        raise typer.Exit(1)
