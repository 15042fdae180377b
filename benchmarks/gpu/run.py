"""What warmpath brings on one GPU: all rows beside plain vLLM on the same card, in a few minutes, without a network.

The model has random weights, by its shape. Each row is written to the JSON when it is known; one that fails says why.
"""

import argparse
import importlib.util
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from benchmarks.common.report import BenchmarkError, names_of, parser_of, versions
from benchmarks.common.server import MARK, leaving_on_sigterm, marked_processes
from benchmarks.engine import compare
from benchmarks.gpu import rows
from benchmarks.gpu.clients import Clients, Target
from benchmarks.gpu.rows import Bench, Figures
from benchmarks.gpu.shapes import SHAPES, Shape, make_checkpoint, write_weights
from benchmarks.gpu.systems import MODEL, TENANTS, Card, Warmpath, find_card, vllm_flags
from benchmarks.peers.vllm_serve import CPU_ENVIRONMENT, vllm_server
from serve_app.cli.bench.client import RequestFailed
from serve_app.config.engine import VLLM_CPU_BLOCK_SIZE, vllm_missing

ALONE = ("first_token", "decode", "request")
"""Rows of one replica beside `vllm serve`."""
TOGETHER = ("routing", "copy", "flood", "predictions", "kill")
"""Rows of two replicas. The killed one takes a while to come back, so it is the last."""
ROWS = (*ALONE, *TOGETHER, "built_in")
START_S, ROW_S = 300.0, 150.0
"""The most time of a start and of a row, so that one that hangs leaves some for the others."""
END_S = 15.0
"""Kept for the end: everything is stopped within it."""
FAILURES = (BenchmarkError, RequestFailed, httpx.HTTPError)


class Cut(SystemExit):
    """A row or the whole run is out of time. Event loops pass on no other exception of a signal's handler."""


class Report:
    """The rows so far; its file is always a whole JSON document."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any], card: Card) -> None:
        self._path = path
        self._began_s = time.monotonic()
        self.rows: dict[str, Any] = {}
        self.document = {
            "settings": dict(settings), "versions": versions(), "card": card.name or "none: a rehearsal",
            "rows": self.rows,
        }  # fmt: skip

    def add(self, name: str, figures: Figures | None, said: str) -> None:
        """Write a row; without figures it says why it was not measured."""
        row = {"not_measured": said} if figures is None else {"said": said, "figures": figures}
        self.rows[name] = row | {"at_s": round(time.monotonic() - self._began_s, 1)}
        print(f"{name}: {'not measured: ' if figures is None else ''}{said}", file=sys.stderr, flush=True)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            whole = self._path.with_name(f"{self._path.name}.part")
            whole.write_text(json.dumps(self.document, indent=2, default=str) + "\n")
            whole.replace(self._path)


class Clock:
    """The run's time."""

    def __init__(self, minutes: float) -> None:
        self._end_s = time.monotonic() + 60 * minutes - END_S

    @property
    def left_s(self) -> float:
        """The seconds left."""
        return self._end_s - time.monotonic()

    def less_than(self, most_s: float) -> float:
        """Return the seconds for a wait inside ``bound(most_s)``, so that the wait ends first, with its own words."""
        return max(0.0, min(most_s, self.left_s) - 5.0)

    @contextmanager
    def bound(self, most_s: float) -> Iterator[None]:
        """Raise Cut in the block when its time, or the run's, is over. Bounds do not nest."""

        def cut(*_: object) -> None:
            raise Cut(f"it took longer than {most_s:.0f} s" if self.left_s > 1 else "the time (--minutes) was over")

        signal.signal(signal.SIGALRM, cut)
        signal.setitimer(signal.ITIMER_REAL, max(0.01, min(most_s, self.left_s)))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


class Run:
    """One run of the wanted rows. ``stack``: stops what was started; ``work``: an empty directory."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack, work: Path) -> None:
        self.shape, self.wanted, self.card = SHAPES[options.shape], set(options.rows), find_card()
        self.report = Report(options.json, vars(options), self.card)
        self.clock = Clock(options.minutes)
        self.marks = {name: uuid.uuid4().hex for name in ("warmpath", "vllm serve")}
        self.targets: dict[str, Target] = {}
        self.prefill_tokens_per_s = 0.0
        self._stack, self._work = stack, work
        # Called last of all: what outlives its owner, because that was killed, ends here.
        stack.callback(end_marked, list(self.marks.values()))
        checkpoint = make_checkpoint(self.shape, work / "checkpoint")
        self.bench = Bench(self.shape, checkpoint, stack.enter_context(Clients()))

    def all(self) -> None:
        """Measure the rows, and say of each that could not be measured why."""
        if importlib.util.find_spec("ray") is None:
            self._row("first_token", lambda: in_one_process(self.shape, self.bench.checkpoint), 2 * START_S)
            self._not_measured("Ray is not installed here")
            return
        try:
            ours = Warmpath(self.shape, self.card, self.marks["warmpath"])
            with self.clock.bound(ROW_S):
                self._stack.enter_context(ours)
            if self.wanted - {"built_in"}:
                self._with_vllm(ours)
            self._row("built_in", lambda: self._built_in(ours), ROW_S + START_S)
        except (*FAILURES, Cut) as error:
            self._not_measured(str(error))

    def _with_vllm(self, ours: Warmpath) -> None:
        """One replica beside `vllm serve`, which start at the same time; then two replicas, without it."""
        self._say("starting warmpath and vllm serve")
        ours.start(self.bench.checkpoint, "vllm")
        with ExitStack() as peer:
            if self.wanted & set(ALONE):
                with self._trying("vllm serve", START_S):
                    url = peer.enter_context(self._vllm_serve())
                    self.targets["vllm serve"] = Target(url, {}, self.marks["vllm serve"])
            with self._trying("warmpath", START_S):
                ours.wait(1, self.clock.less_than(START_S))
                self.targets["warmpath"] = Target(ours.url, ours.bearer(TENANTS[0]), ours.mark)
            self._say("measuring one replica")
            if self.targets:
                self._row("first_token", lambda: rows.first_tokens(self.bench, self.targets))
                self._row("decode", lambda: rows.decoding(self.bench, self.targets))
                self._row("request", lambda: rows.requests(self.bench, self.targets))
        if "warmpath" in self.targets and self.wanted & set(TOGETHER):
            with self._trying("two replicas", START_S):
                self._say("starting a second replica")
                ours.change(self.clock.less_than(START_S), autoscaling={"min_replicas": 2, "max_replicas": 2})
                self.prefill_tokens_per_s = rows.prefill_rate(self.bench, self.targets["warmpath"])
            if self.prefill_tokens_per_s:
                self._two_replicas(ours)
        self._not_measured("their server did not start", ROWS[:-1])

    def _two_replicas(self, ours: Warmpath) -> None:
        self._say("measuring two replicas")
        bench, rate = self.bench, self.prefill_tokens_per_s
        if "routing" in self.wanted:
            with self._trying("routing", ROW_S):
                for name, figures, said in rows.routing(bench, ours, rate):
                    self.report.add(f"routing {name}", figures, said)
                self.wanted.discard("routing")
        self._row("copy", lambda: rows.copying(bench, ours))
        self._row("flood", lambda: rows.flood(bench, ours, rate))
        self._row("predictions", lambda: rows.predicting(bench, ours))
        self._row("kill", lambda: rows.killing(bench, ours))

    def _built_in(self, ours: Warmpath) -> tuple[Figures, str]:
        """The built-in engine's first token and decode, beside those of vLLM that were measured."""
        ours.start(write_weights(self.bench.checkpoint, self._work / "weights"), "torch")
        ours.wait(1, self.clock.less_than(START_S))
        smaller = replace(self.shape, prompts=self.shape.prompts[:1], streams=self.shape.streams[1:2])
        bench = replace(self.bench, shape=smaller)
        target = {"built-in engine": Target(ours.url, ours.bearer(TENANTS[0]), ours.mark)}
        (first, said), (decode, also) = rows.first_tokens(bench, target), rows.decoding(bench, target)
        return {"first_token": first, "decode": decode}, f"{said} {also}"

    @contextmanager
    def _vllm_serve(self) -> Iterator[str]:
        env = {MARK: self.marks["vllm serve"], **({} if self.card.total_bytes else CPU_ENVIRONMENT)}
        flags, within_s = vllm_flags(self.shape, self.card), self.clock.less_than(START_S)
        with vllm_server(self.bench.checkpoint, MODEL, flags, env, sys.executable, within_s) as url:
            yield url

    def _row(self, name: str, measure: Callable[[], tuple[Figures, str]], most_s: float = ROW_S) -> None:
        """Measure a row, if it is wanted."""
        if name in self.wanted:
            with self._trying(name, most_s):
                self.report.add(name, *measure())
                self.wanted.discard(name)

    @contextmanager
    def _trying(self, name: str, most_s: float) -> Iterator[None]:
        """Report ``name`` as not measured if the block fails or takes too long."""
        try:
            with self.clock.bound(most_s):
                yield
        except (Exception, Cut) as error:
            known = isinstance(error, (*FAILURES, Cut))
            self.report.add(name, None, f"{'' if known else type(error).__name__ + ': '}{error}"[-3000:])
            self.wanted.discard(name)

    def _not_measured(self, why: str, names: Sequence[str] = ROWS) -> None:
        for name in names:
            if name in self.wanted:
                self.report.add(name, None, why)
                self.wanted.discard(name)

    def _say(self, what: str) -> None:
        print(f"[{self.clock.left_s:.0f} s left] {what}", file=sys.stderr, flush=True)


def in_one_process(shape: Shape, checkpoint: Path) -> tuple[Figures, str]:
    """Return what the engine under warmpath and vLLM alone need in one process, without Ray and HTTP."""
    workload = {
        "model": str(checkpoint), "vocab_size": shape.vocab_size, "max_model_len": shape.max_model_len,
        "cache_tokens": 2 * shape.max_model_len, "dtype": shape.dtype, "runs": shape.runs, "question_tokens": 32,
        "device": "auto", "threads": 1, "block_size": VLLM_CPU_BLOCK_SIZE, "prefix_tokens": shape.prompts[-1],
        "batch_new_tokens": 8, "load_format": "dummy",
    }  # fmt: skip
    found = {name: compare.run(name, workload, sys.executable) for name in ("warmpath_vllm", "vllm_cpu")}
    return found | {"ratios": compare.ratios(found)}, f"Without Ray Serve, in one process: {compare.summary(found)}"


def end_marked(marks: Sequence[str]) -> None:
    """Kill the processes that are left of the systems with these marks."""
    for mark in marks:
        for process, _ in list(marked_processes(mark)):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def main() -> None:
    """Parse flags, and measure; what was started is stopped, also at SIGTERM."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b", help="tiny: a rehearsal, without a GPU too")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything, starts and end included")
    parser.add_argument("--rows", type=names_of(ROWS), default=list(ROWS), help=f"of {', '.join(ROWS)}")
    options = parser.parse_args()
    if vllm_missing():
        raise BenchmarkError("this needs vLLM: on a CPU run .venv-vllm/bin/python -m benchmarks gpu (make venv-vllm)")
    if options.shape != "tiny" and not find_card().total_bytes:
        raise BenchmarkError(f"nvidia-smi names no GPU, and {options.shape} needs one; --shape tiny rehearses all rows")
    with leaving_on_sigterm(), TemporaryDirectory(dir=_shared_memory()) as work, ExitStack() as stack:
        run = Run(options, stack, Path(work))
        run.all()
    print(json.dumps(run.report.document, indent=2, default=str))


def _shared_memory() -> str | None:
    """Return a directory in memory for weights, if there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108


if __name__ == "__main__":
    main()
