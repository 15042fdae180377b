"""What warmpath brings on one GPU: all rows beside plain vLLM on the same card, in a few minutes, without a network.

The model has random weights, by its shape. Each row is written to the JSON when it is known; one that fails says why.
"""

import importlib.util
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from benchmarks.common.harness import Findings, Options, benchmark, flag, names_flag, note, versions
from benchmarks.common.report import BenchmarkError
from benchmarks.common.server import MARK, leaving_on_sigterm, marked_processes
from benchmarks.engine import compare
from benchmarks.gpu import models, rows, two
from benchmarks.gpu.clients import Clients
from benchmarks.gpu.rows import Bench, MeasuredRow, RowFigures
from benchmarks.gpu.shapes import SHAPES, Shape, drafter, make_checkpoint, windowed, write_weights
from benchmarks.gpu.systems import MODEL, TENANTS, Card, Target, Warmpath, find_card, vllm_flags
from benchmarks.peers.vllm_serve import CPU_ENVIRONMENT, vllm_server
from cluster.local import ClusterError
from serve_app.cli.local_ray import answers
from serve_app.config.engine import VLLM_CPU_BLOCK_SIZE, EngineName, vllm_missing
from serve_app.replay.client import RequestFailed

ALONE = {"first_token": rows.first_token, "decode": rows.decode, "request": rows.request}
"""Rows of one replica beside `vllm serve`."""
TOGETHER = {"copy": two.copy, "flood": two.flood, "predictions": two.predictions, "kill": two.kill}
"""Rows of two replicas, after the routing. The killed one takes a while to come back, so it is the last."""
ROWS = (*ALONE, "routing", *TOGETHER, "built_in")
MORE = ("drafts", "windowed")
"""Rows of one replica beside `vllm serve` that need a start of their own, and are measured if they are named."""
START_S, ROW_S, OWN_ROW_S = 300.0, 150.0, 240.0
CPU_ROW_S, CPU_REST_S = 400.0, 1.2
"""The most time of a start, of a row, and of one of ``MORE``, so that one that hangs leaves some for the others."""
FAILURES = (BenchmarkError, RequestFailed, httpx.HTTPError, ClusterError)
_ROWS_HELP = f"of {', '.join(ROWS)}, and of {', '.join(MORE)}, which start servers of their own (default: without)"
END_S = 15.0
"""Kept for the end: everything is stopped within it."""


class Cut(SystemExit):
    """A row or the whole run is out of time. Event loops pass on no other exception of a signal's handler."""


class Report:
    """The rows so far; its file is always a whole JSON document."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any], card: Card) -> None:
        self._path, self._began_s = path, time.monotonic()
        self.rows: dict[str, Any] = {}
        self._card = {"card": card.name or "none: a rehearsal"}
        self._head = {"settings": dict(settings), "versions": versions(), **self._card}

    def add(self, name: str, figures: RowFigures | None, said: str) -> None:
        """Write a row; without figures it says why it was not measured."""
        row = {"not_measured": said} if figures is None else {"said": said, "figures": figures}
        self.rows[name] = row | {"at_s": round(time.monotonic() - self._began_s, 1)}
        note(f"{name}: {'not measured: ' if figures is None else ''}{said}")
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            whole = self._path.with_name(f"{self._path.name}.part")
            findings = self.findings()
            document = self._head | {"results": findings.results, "summary": findings.summary}
            whole.write_text(json.dumps(document, indent=2, default=str) + "\n")
            whole.replace(self._path)

    def findings(self) -> Findings:
        """Return the rows so far."""
        summary = " ".join(row["said"] for row in self.rows.values() if "said" in row)
        return Findings(self.rows, summary, more=self._card)


class Run:
    """One run of the wanted rows. ``stack``: stops what was started; ``work``: an empty directory."""

    def __init__(self, options: Options, stack: ExitStack, work: Path) -> None:
        self._end_s = time.monotonic() + 60 * float(options.minutes) - END_S
        self._shape, self._left, self._card = SHAPES[options.shape], set(options.rows), find_card()
        self._windowed = windowed(options.shape)
        self.report = Report(options.json, vars(options), self._card)
        self._mark, self._work = uuid.uuid4().hex, work
        # Called last of all: what outlives its owner, because that was killed, ends here.
        stack.callback(end_marked, self._mark)
        checkpoint = make_checkpoint(self._shape, work / "checkpoint")
        rest_s = 0.0 if self._card.name else CPU_REST_S
        self._bench = Bench(self._shape, checkpoint, stack.enter_context(Clients()), self._card.block_size, rest_s)

    def all(self) -> None:
        """Measure the rows, and say of each that could not be measured why."""
        if importlib.util.find_spec("ray") is None:
            self.row("first_token", lambda: in_one_process(self._shape, self._bench.checkpoint), 2 * START_S)
            self._not_measured((*ROWS, *MORE), "Ray is not installed here")
        if self._left & ALONE.keys():
            with self._pair("the first servers", self._bench) as (targets, _):
                for name, alone in ALONE.items() if targets else ():
                    self.row(name, lambda: self._of_those_alive(alone, targets))  # noqa: B023
        self._not_measured(ALONE, "no server started; see their rows")
        if self._left - {"built_in", *MORE}:
            with self._trying("two replicas"), self._warmpath("vllm", 2, self._bench) as ours:
                self._ready("the two replicas", ours)
                if "routing" in self._left:
                    with self._trying("routing", ROW_S):
                        for name, row in two.routing(self._bench, ours):
                            self.report.add(f"routing {name}", *row)
                        self._left.discard("routing")
                for name, measure in TOGETHER.items():
                    self.row(name, lambda: measure(self._bench, ours))  # noqa: B023
        self._not_measured(ROWS[:-1], "the two replicas did not start; see their row")
        self.row("built_in", self._built_in, START_S)
        if "drafts" in self._left:
            with self._trying("drafts"):
                head = make_checkpoint(drafter(self._shape), self._work / "head")
                drafting = {"method": "eagle", "model": str(head), "num_speculative_tokens": models.DRAFT_TOKENS}
                self._own("drafts", self._bench, models.drafts, drafting)
        if "windowed" in self._left:
            with self._trying("windowed"):
                checkpoint = make_checkpoint(self._windowed, self._work / "windowed")
                bench = self._bench._replace(shape=self._windowed, checkpoint=checkpoint)
                self._own("windowed", bench, models.windowed)

    def _own(
        self,
        name: str,
        bench: Bench,
        measure: Callable[..., MeasuredRow],
        drafting: Mapping[str, Any] | None = None,
    ) -> None:
        """Measure a row of two eager servers of its own."""
        with self._pair(f"the servers of {name}", bench, eager=True, drafting=drafting) as (targets, ours):
            if targets:
                row = partial(measure, ours=ours)
                self.row(name, lambda: self._of_those_alive(row, targets), OWN_ROW_S)
        self._not_measured([name], "no server started; see their rows")

    @contextmanager
    def _pair(self, what: str, bench: Bench, **how: Any) -> Iterator[tuple[dict[str, Target], Warmpath | None]]:
        """One replica and `vllm serve`, which start at the same time, and are measured in turn; those that started."""
        targets: dict[str, Target] = {}
        ours: Warmpath | None = None
        with ExitStack() as servers:
            with self._trying("warmpath"):
                ours = servers.enter_context(self._warmpath("vllm", 1, bench, **how))
            with self._trying("vllm serve"):
                env = {MARK: self._mark + "peer", **({} if self._card.name else CPU_ENVIRONMENT)}
                flags, python = vllm_flags(bench.shape, self._card, **how), sys.executable
                peer = vllm_server(bench.checkpoint, MODEL, flags, env, python, self._within_s())
                targets["vllm serve"] = Target(servers.enter_context(peer), {}, env[MARK])
            if ours is not None:
                with self._trying("warmpath"):
                    self._ready(what, ours)
                    targets["warmpath"] = ours.target(TENANTS[0])
            yield targets, ours

    def _of_those_alive(
        self, measure: Callable[[Bench, rows.Targets], MeasuredRow], targets: dict[str, Target]
    ) -> MeasuredRow:
        """Measure a row; if a server has ended, measure it again without that one."""
        while True:
            try:
                return measure(self._bench, targets)
            except FAILURES as error:
                ended = [name for name, target in targets.items() if not answers(f"{target.url}/health")]
                if not ended or len(ended) == len(targets):
                    raise
                for name in ended:
                    del targets[name]
                    self.report.add(name, None, f"it has ended: {error}")

    def _built_in(self) -> MeasuredRow:
        """The built-in engine's first token and decode, beside those of vLLM that were measured."""
        bench = self._bench._replace(checkpoint=write_weights(self._bench.checkpoint, self._work / "weights"))
        with self._warmpath("torch", 1, bench) as ours:
            ours.wait(self._within_s())
            smaller = self._shape._replace(prompts=self._shape.prompts[:1], streams=self._shape.streams[1:2])
            bench, target = self._bench._replace(shape=smaller), {"built-in engine": ours.target(TENANTS[0])}
            (first, said), (decode, also) = rows.first_token(bench, target), rows.decode(bench, target)
        return {"first_token": first, "decode": decode}, f"{said} {also}"

    def _warmpath(self, engine: EngineName, replicas: int, bench: Bench, **how: Any) -> Warmpath:
        if self._within_s() < END_S:
            raise Cut("the time (--minutes) was over")
        return Warmpath(bench.shape, self._card, self._mark, bench.checkpoint, engine, replicas, **how)

    def row(self, name: str, measure: Callable[[], MeasuredRow], most_s: float = 0.0) -> None:
        """Measure a row, if it is wanted."""
        if name in self._left:
            with self._trying(name, most_s or (ROW_S if self._card.name else CPU_ROW_S)):
                self.report.add(name, *measure())
                self._left.discard(name)

    @contextmanager
    def _trying(self, name: str, most_s: float | None = None) -> Iterator[None]:
        """Report ``name`` as not measured if the block fails, or takes longer than ``most_s``, if that is given."""
        try:
            with ExitStack() as bounds:
                if most_s is not None:
                    bounds.enter_context(self._bound(most_s))
                yield
        except (Exception, Cut) as error:
            expected = isinstance(error, (*FAILURES, Cut))
            self.report.add(name, None, f"{'' if expected else type(error).__name__ + ': '}{error}"[-3000:])
            self._left.discard(name)

    @contextmanager
    def _bound(self, most_s: float) -> Iterator[None]:
        """Raise Cut in the block when its time, or the run's, is over."""

        def cut(*_: object) -> None:
            over = time.monotonic() > self._end_s - 1
            raise Cut("the time (--minutes) was over" if over else f"it took longer than {most_s:.0f} s")

        signal.signal(signal.SIGALRM, cut)
        signal.setitimer(signal.ITIMER_REAL, max(0.01, min(most_s, self._end_s - time.monotonic())))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _within_s(self) -> float:
        """Return the seconds that a start may take."""
        return float(max(0.0, min(START_S, self._end_s - time.monotonic())))

    def _ready(self, what: str, ours: Warmpath) -> None:
        """Wait for a server, and report how long that took."""
        began_s = time.monotonic()
        ours.wait(self._within_s())
        self.report.add(what, {"waited_s": time.monotonic() - began_s}, "They are ready.")

    def _not_measured(self, names: Sequence[str] | Mapping[str, Any], why: str) -> None:
        for name in self._left.intersection(names):
            self.report.add(name, None, why)
            self._left.discard(name)


def in_one_process(shape: Shape, checkpoint: Path) -> MeasuredRow:
    """Return what the engine under warmpath and vLLM alone need in one process, without Ray and HTTP."""
    workload = {
        "model": str(checkpoint), "vocab_size": shape.config["vocab_size"], "max_model_len": shape.max_model_len,
        "cache_tokens": 2 * shape.max_model_len, "dtype": shape.dtype, "runs": shape.runs, "question_tokens": 32,
        "device": "auto", "threads": 1, "block_size": VLLM_CPU_BLOCK_SIZE, "prefix_tokens": shape.prompts[-1],
        "batch_new_tokens": 8, "load_format": "dummy",
    }  # fmt: skip
    rows = {name: compare.measure(name, workload, sys.executable) for name in ("warmpath_vllm", "vllm_cpu")}
    return rows | {"ratios": compare.ratios(rows)}, f"Without Ray Serve, in one process: {compare.summary(rows)}"


def end_marked(mark: str) -> None:
    """Kill the processes that are left of the systems with a mark."""
    for process, _ in [*marked_processes(mark), *marked_processes(mark + "peer")]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@benchmark(
    __doc__,
    flag("shape", "llama-8b", "without a GPU: tiny, a rehearsal, and cpu", choices=SHAPES),
    flag("minutes", 9.0, "for everything, starts and end included"),
    names_flag("rows", (*ROWS, *MORE), ",".join(ROWS), _ROWS_HELP),
)
def run(options: Options) -> Findings:
    """Measure; what was started is stopped, also at SIGTERM."""
    if vllm_missing():
        raise BenchmarkError("this needs vLLM: on a CPU run .venv-vllm/bin/python -m benchmarks gpu (make venv-vllm)")
    if options.shape not in ("tiny", "cpu") and not find_card().name:
        raise BenchmarkError(f"nvidia-smi names no GPU, and {options.shape} needs one; --shape tiny rehearses all rows")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    with leaving_on_sigterm(), TemporaryDirectory(dir=memory) as work, ExitStack() as stack:
        rows = Run(options, stack, Path(work))
        rows.all()
    return rows.report.findings()
