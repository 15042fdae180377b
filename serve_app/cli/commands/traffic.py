"""`warmpath traffic`: recorded traffic made from other files, shown, and written in forms of other tools."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serve_app.cli.console import Commands, console, fail, harmless
from serve_app.traffic.forms import SourceForm, TargetForm

if TYPE_CHECKING:
    from serve_app.traffic.importers.prompts import ServerPrompts

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    help="Recorded traffic: import, export, show.",
)

Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Coarser = Annotated[int | None, typer.Option(min=1, help="tokens of an id: a multiple of the files'")]


@app.command("import")
def import_(
    sources: Annotated[list[Path], typer.Argument(help="files of requests; .gz, too")],
    to: Annotated[Path, typer.Option(help="the file to write; .gz packs it")],
    form: Annotated[SourceForm, typer.Option("--format", help="default: by content")] = SourceForm.auto,
    tokenizer: Annotated[
        str | None, typer.Option(help="for text: the model that was served, named as for `warmpath serve`")
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens of an id; default: the source's, 16 for text")
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0.0001, help="requests, or sessions, a second where a file has no times")
    ] = 1.0,
    output_tokens: Annotated[int, typer.Option(min=1, help="of answers whose length nothing tells")] = 1,
) -> None:
    """Make recorded traffic of other files. No text is kept; ids and names are by a key made now and kept nowhere."""
    from serve_app.request_files import TraceError
    from serve_app.traffic.importers.run import import_traffic
    from serve_app.traffic.importers.source import ImportOptions

    reader = _tokenizer(tokenizer, block_tokens) if tokenizer is not None else None
    with _progress(sources) as on_line:
        options = ImportOptions(reader=reader, rate=rate, output_tokens=output_tokens, on_line=on_line)
        try:
            written = import_traffic(sources, form, to, options, block_tokens)
        except TraceError as error:
            fail(str(error))
    _tell(options.notes)
    console.print(f"{to}: {written:,} requests", soft_wrap=True)


@app.command()
def export(
    files: Annotated[list[Path], typer.Argument(help="recorded traffic, of one recording or several; .gz, too")],
    to: Annotated[Path, typer.Option(help="the file to write; .gz packs it")],
    form: Annotated[TargetForm, typer.Option("--format", help="mooncake: ids of 512 tokens; aiperf: the file's")],
    block_tokens: Coarser = None,
) -> None:
    """Write Mooncake's lines. Tenants, models and times of answers are left out: the form has no place for them."""
    import msgspec

    from serve_app.errors import unread
    from serve_app.request_files import TraceError
    from serve_app.traffic.export import mooncake_lines
    from serve_app.traffic.importers.run import opened
    from serve_app.traffic.reader import MOONCAKE_BLOCK_TOKENS, block_tokens_of

    notes: Counter[str] = Counter()
    written = 0
    encoder = msgspec.json.Encoder()
    try:
        own = max(block_tokens_of(path) for path in files)
        size = block_tokens or (MOONCAKE_BLOCK_TOKENS if form is TargetForm.mooncake else own)
        if to.exists():
            fail(f"{to} exists: name another file, or remove it")
        with _progress(files) as on_line, opened(to, compressed=to.suffix == ".gz") as write:
            for line in mooncake_lines(files, size, notes, on_line):
                write(encoder.encode(line) + b"\n")
                written += 1
    except TraceError as error:
        to.unlink(missing_ok=True)
        fail(str(error))
    except OSError as error:
        fail(f"{to} cannot be written: {unread(error)}")
    _tell(notes)
    flag = f"; aiperf profile --isl-block-size {size}" if form is TargetForm.aiperf else ""
    console.print(f"{to}: {written:,} requests, an id for {size} tokens{flag}", soft_wrap=True)


@app.command()
def show(
    files: Annotated[list[Path], typer.Argument(help="recorded traffic, or Mooncake's lines; .gz, too")],
    as_json: Json = False,
) -> None:
    """Tell what is in a file: requests, tokens, tenants, and what a cache that loses nothing would find."""
    from serve_app.request_files import TraceError
    from serve_app.traffic.reader import read_traffic
    from serve_app.traffic.summary import summary_of

    try:
        with _progress(files, "lines") as on_line:
            told = 0

            def on_progress(lines: int) -> None:
                nonlocal told
                on_line(lines - told)
                told = lines

            workload = read_traffic(files, on_progress=on_progress)
    except TraceError as error:
        fail(str(error))
    summary = summary_of(workload)
    if as_json:
        print(json.dumps(summary, indent=2))
        return
    print(harmless("\n".join(_table(summary))))


def _table(summary: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{summary['requests']:,} requests in {summary['span_s']:,.0f} s, from {summary['started']}; "
        f"{summary['refused']:,} refused"
    )
    yield (
        f"prompts: {summary['prompt_tokens']:,} tokens, {summary['reusable']:.1%} of them seen before; "
        f"answers: {summary['output_tokens']:,} tokens; blocks of {summary['block_tokens']} tokens"
    )
    if summary["cached"] is not None:
        yield f"recorded: {summary['cached']:.1%} of the prompts' tokens from the cache"
    yield summary["rates"]
    yield ""
    wide = max(len(row["name"]) for row in summary["parts"])
    yield f"{'':<{wide}}{'requests':>12}{'prompt tokens':>16}{'seen before':>13}{'TTFT p50':>10}{'p99':>9}"
    for row in summary["parts"]:
        times = "".join(
            f"{'-' if row[name] is None else f'{row[name]:.2f} s':>{width}}"
            for name, width in (("ttft_p50_s", 10), ("ttft_p99_s", 9))
        )
        seen = f"{row['reusable']:.1%}"
        yield f"{row['name']:<{wide}}{row['requests']:>12,}{row['prompt_tokens']:>16,}{seen:>13}{times}"
    for warning in summary["warnings"]:
        yield f"note: {warning}"


def _tokenizer(model: str, block_tokens: int | None) -> "ServerPrompts":
    from router.settings import DEFAULTS
    from serve_app.checkpoints.checkpoint import CheckpointError
    from serve_app.checkpoints.sources import resolve_model
    from serve_app.traffic.importers.prompts import ServerPrompts

    try:
        return ServerPrompts(resolve_model(model, weights=False), block_tokens or DEFAULTS.block_size)
    except (CheckpointError, OSError, ValueError) as error:
        fail(str(error))


def _tell(notes: Counter[str]) -> None:
    for note, times in notes.items():
        console.print(f"note: {times:,} {harmless(note)}", soft_wrap=True)


@contextmanager
def _progress(paths: Sequence[Path], unit: str = "bytes") -> Iterator[Callable[[int], object]]:
    """Show a bar while files are read; yield what hears of each line. A packed file's length is not known."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    known = unit == "bytes" and all(path.suffix != ".gz" and path.is_file() for path in paths)
    total = sum(path.stat().st_size for path in paths) if known else None
    text = "{task.percentage:3.0f} %" if known else f"{{task.completed:,}} {unit}"
    columns = (TextColumn("reading"), BarColumn(), TextColumn(text), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading", total=total)
        waiting = 0

        def on_line(length: int) -> None:
            nonlocal waiting
            waiting += length
            if waiting > 1 << 20 or unit != "bytes":
                progress.advance(task, waiting)
                waiting = 0

        yield on_line
