"""`warmpath replay`: recorded traffic once more, simulated or sent to a server, with a verdict."""

import json
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serve_app.cli.console import console, fail

if TYPE_CHECKING:
    from serve_app.replay.simulated import ReplayPlan
    from serve_app.traffic.workload import Workload


class PromptApi(StrEnum):
    """The APIs that made prompts are sent to."""

    completions = "completions"
    chat = "chat"


class MadeOf(StrEnum):
    """The forms of a made prompt."""

    text = "text"
    ids = "ids"


SHOWN = {
    "name": "",
    "replicas": "replicas",
    "replica_hours": "hours",
    "within_target": "within",
    "ttft_mean_s": "mean TTFT",
    "ttft_p50_s": "p50",
    "ttft_p90_s": "p90",
    "ttft_p99_s": "p99",
    "hit_rate": "hits",
    "hit_rate_after_changes": "hits after",
    "changes": "changes",
    "lost": "lost",
}
"""The columns of the table, by their names in JSON."""
NARROWEST = 124
"""The table's width; a narrower terminal breaks its lines."""


def replay(
    files: Annotated[list[Path], typer.Argument(help="recorded or imported traffic, or Mooncake's lines; .gz, too")],
    autoscaling: Annotated[
        bool, typer.Option("--autoscaling", help="compare rules, and find the cheapest settings")
    ] = False,
    ttft: Annotated[str, typer.Option(help="target for the time to first token: 2s, 500ms")] = "2s",
    part: Annotated[float, typer.Option(min=0.01, max=1.0, help="of all requests, within that time")] = 0.99,
    policies: Annotated[str, typer.Option(help="side by side")] = "estimated_ttft,power_of_two,round_robin",
    replicas: Annotated[str, typer.Option(help="side by side: 2,4; default: the file's, or as many as needed")] = "",
    pool_tokens: Annotated[str, typer.Option(help="KV pool of a replica, side by side: 200000,400000")] = "",
    host_tokens: Annotated[str, typer.Option(help="host memory below the pool, side by side: 0,1000000")] = "",
    host_rate: Annotated[float, typer.Option(min=1, help="tokens a second from host memory")] = 200_000.0,
    rules: Annotated[str, typer.Option(help="of autoscaling: ours,serve,ray_ttft,llmd,fixed,oracle")] = "",
    min_replicas: Annotated[int, typer.Option(min=0, help="with --autoscaling; 0: to zero and back")] = 1,
    max_replicas: Annotated[int | None, typer.Option(min=1, help="with --autoscaling; default: by the traffic")] = None,
    start_s: Annotated[float, typer.Option(min=0, help="seconds until a new replica takes requests")] = 60.0,
    copies: Annotated[bool, typer.Option(help="warm joins and hand-over between replicas")] = True,
    card: Annotated[str, typer.Option(help="rates of a GPU, with --model: h100, a100, l40s ...")] = "",
    cards: Annotated[int, typer.Option(min=1, help="GPUs of a replica")] = 1,
    model: Annotated[
        str,
        typer.Option(help="with --card: as for `warmpath serve`; with --url: its name there, or NAME=THE FILE'S, ..."),
    ] = "",
    dtype: Annotated[str, typer.Option(help="with --card: float32, bfloat16 or float16")] = "bfloat16",
    prefill_rate: Annotated[float | None, typer.Option(min=1, help="prompt tokens a second of a replica")] = None,
    decode_step_ms: Annotated[float | None, typer.Option(min=0, help="a token's time")] = None,
    pull_rate: Annotated[
        float | None, typer.Option(min=0, help="tokens a second between replicas; 0: no copies")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="of a replica's hour")] = None,
    block_tokens: Annotated[int | None, typer.Option(min=1, help="coarser blocks than the file's")] = None,
    processes: Annotated[int, typer.Option(min=0, help="simulations at a time; 0: one a CPU")] = 0,
    url: Annotated[str, typer.Option(help="send it to this server of OpenAI's API, without /v1, instead")] = "",
    api_key: Annotated[str, typer.Option(envvar="WARMPATH_API_KEY", help="with --url: a key for all tenants")] = "",
    api_keys: Annotated[
        Path | None,
        typer.Option(help='with --url: JSON, {"tenant or its number": "key"}; "$NAME" from the environment'),
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="with --url: divides the file's times")] = 1.0,
    tokenizer: Annotated[str, typer.Option(help="with --url: of the made prompts; default: the served model's")] = "",
    api: Annotated[PromptApi, typer.Option(help="with --url")] = PromptApi.completions,
    prompts: Annotated[MadeOf, typer.Option(help="with --url: what completions are sent")] = MadeOf.text,
    skip: Annotated[int, typer.Option(min=0, help="with --url: requests left out at the beginning")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="with --url: requests at most")] = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="with --url: of a request")] = 600.0,
    seed: Annotated[int | None, typer.Option(help="with --url: repeats the prompts of another replay")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with charts here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Replay recorded traffic in virtual time, simulated; say what caches save, and which settings it needs."""
    from serve_app.errors import unread
    from serve_app.replay.simulated import ReplayPlan
    from serve_app.request_files import TraceError

    try:
        workload = _read(files, block_tokens)
        if url:
            _over_http(
                workload,
                as_json,
                url=url.rstrip("/"),
                models=_names(model),
                api_key=api_key,
                api_keys=api_keys,
                speed=speed,
                tokenizer=tokenizer,
                api=api.value,
                prompts=prompts.value,
                skip=skip,
                limit=limit,
                timeout_s=timeout_s,
                seed=seed,
            )
            return
        plan = ReplayPlan(
            autoscaling=autoscaling,
            ttft_s=_seconds(ttft),
            part=part,
            policies=_names(policies),
            replicas=_numbers(replicas, "--replicas"),
            pool_tokens=_numbers(pool_tokens, "--pool-tokens"),
            host_tokens=_numbers(host_tokens, "--host-tokens"),
            host_rate=host_rate,
            rules=_names(rules),
            least=min_replicas,
            most=max_replicas,
            start_s=start_s,
            copies=copies,
            card=card,
            cards=cards,
            model=model,
            dtype=dtype,
            prefill_rate=prefill_rate,
            decode_step_s=None if decode_step_ms is None else decode_step_ms / 1000.0,
            pull_rate=pull_rate,
            price=price,
            processes=processes,
        )
        report = _simulated(workload, plan)
    except (TraceError, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(unread(error))
    report["file"] = ", ".join(str(file) for file in files)
    report["made_at"] = datetime.now(UTC).isoformat(timespec="seconds")
    if html is not None:
        from serve_app.replay.page import write_page

        try:
            write_page(report, html)
        except OSError as error:
            fail(f"--html {html}: {unread(error)}")
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report, plan)
    if html is not None:
        console.print(f"Charts: {html}")


def _read(files: list[Path], block_tokens: int | None) -> "Workload":
    from rich.progress import Progress, TextColumn

    from serve_app.traffic.reader import read_traffic

    with Progress(TextColumn("reading: {task.completed:,} lines"), console=console, transient=True) as bars:
        reading = bars.add_task("", total=None)
        return read_traffic(
            files, block_tokens=block_tokens, on_progress=lambda lines: bars.update(reading, completed=lines)
        )


def _simulated(workload: "Workload", plan: "ReplayPlan") -> dict[str, Any]:
    from rich.progress import Progress

    from serve_app.replay.simulated import replay_report

    with Progress(console=console, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def told(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        return replay_report(workload, plan, told)


def _over_http(
    workload: "Workload", as_json: bool, *, models: tuple[str, ...], api_keys: Path | None, **options: Any
) -> None:
    from rich.console import Console

    from serve_app.replay.http_results import HttpProgress, http_figures, http_table
    from serve_app.replay.over_http import HttpReplay, models_of, read_keys, replay_over_http

    keys = read_keys(api_keys) if api_keys is not None else {}
    settings = HttpReplay(models=models_of(models), api_keys=keys, **options)
    total = min(max(len(workload) - settings.skip, 0), settings.limit or len(workload))
    for warning in workload.warnings:
        console.print(f"warning: {warning}", style="yellow")
    with HttpProgress(total, console) as told:
        found = replay_over_http(workload, settings, told)
    figures = http_figures(found)
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    Console(highlight=False, markup=False, emoji=False).print(http_table(figures))
    for note in found.notes:
        console.print(note)


def _print(report: dict[str, Any], plan: "ReplayPlan") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    out = Console(highlight=False, markup=False, emoji=False)
    out.width = max(out.width, NARROWEST)
    for warning in report["warnings"]:
        console.print(f"warning: {warning}", style="yellow")
    models = {row["model"] for row in report["rows"]}
    rows = report["rows"] if report["recorded"] is None else [*report["recorded"], *report["rows"]]
    for model in sorted(models):
        table = Table(title=f"Simulated, {model}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        shown = [name for name in SHOWN if any(row.get(name) is not None for row in rows)]
        for name in shown:
            heading = SHOWN[name] + (f" {plan.ttft_s:g} s" if name == "within_target" else "")
            table.add_column(heading, justify="left" if name == "name" else "right", no_wrap=True)
        for row in rows:
            if row["model"] == model:
                table.add_row(*(_cell(name, row.get(name)) for name in shown))
        out.print(table)
    for sentence in report["verdict"]:
        out.print(sentence, soft_wrap=True)
    if report["settings"]:
        out.print("\nSettings:\n" + report["settings"].rstrip())


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in ("within_target", "hit_rate", "hit_rate_after_changes"):
        return f"{value:.1%}"
    if name.startswith("ttft"):
        return f"{value:.3g} s"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    try:
        return tuple(int(name) for name in _names(text))
    except ValueError:
        fail(f"{flag} takes whole numbers with commas between them, not {text!r}")


def _seconds(text: str) -> float:
    from pydantic import TypeAdapter, ValidationError

    from serve_app.config.quantities import Seconds

    try:
        return float(TypeAdapter(Seconds).validate_python(float(text) if text.replace(".", "", 1).isdigit() else text))
    except ValidationError as error:
        fail(f"--ttft {error.errors()[0]['msg']}")
