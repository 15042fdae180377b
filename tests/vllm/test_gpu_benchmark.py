"""`benchmarks gpu --shape tiny` on CPUs: all rows, and what it leaves if it is cut or a server dies."""

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.common.server import marked_processes
from benchmarks.gpu.run import ALONE, MORE, ROWS, START_S
from tests.harness.eventually import eventually

ROOT = Path(__file__).parents[2]
MARK_OF_RUN = "WARMPATH_TEST_RUN"


class Started:
    """The processes of a benchmark, which inherit its mark; those that rename themselves have a parent with it."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self.environment = {**os.environ, MARK_OF_RUN: self._mark}
        self._seen: set[psutil.Process] = set()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            self._seen.update(process for process, _ in marked_processes(self._mark, MARK_OF_RUN))

    def stop(self) -> None:
        self._over.set()
        self._watcher.join()

    def running(self) -> dict[int, str]:
        """Return the command lines of those that run."""
        found = {}
        for process in [*self._seen]:
            with suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline()).lower()
        return found


@contextmanager
def benchmark(out: Path, rows: str) -> Iterator[tuple[subprocess.Popen[str], Started]]:
    """Run the benchmark; when the block ends it has to end too, and nothing that it started may run."""
    command = [sys.executable, "-m", "benchmarks", "gpu", "--shape", "tiny", "--rows", rows, "--json", str(out)]
    started = Started()
    process = subprocess.Popen(
        command, cwd=ROOT, env=started.environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process, started
        process.communicate(timeout=1200)
        eventually(lambda: not started.running())
    finally:
        started.stop()
        for pid in (process.pid, *started.running()):
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        process.wait()


def rows_of(out: Path) -> Any:
    return json.loads(out.read_text())["results"] if out.exists() else {}


@pytest.mark.long
def test_all_rows_are_measured(tmp_path: Path) -> None:
    """Those of one replica have both systems; all answers of a killed replica are whole, and equal in float32."""
    out = tmp_path / "gpu.json"
    with benchmark(out, ",".join(ROWS)) as (process, _):
        pass
    rows = rows_of(out)
    assert process.returncode == 0
    assert [(name, row["not_measured"]) for name, row in rows.items() if "not_measured" in row] == []
    assert rows.keys() > {*ALONE, "routing agents", "routing chats", "copy", "flood", "kill", "built_in"}
    for name in ("first_token", "decode"):
        assert all(row.keys() == {"warmpath", "vllm serve"} for row in rows[name]["figures"].values())
    killed = rows["kill"]["figures"]
    assert (killed["whole"], killed["equal"], killed["equal_undisturbed"]) == (16, 16, 16)
    assert rows["predictions"]["figures"]["exact_share"] > 0.95
    assert rows["flood"]["figures"]["hit_rate_ratio"] > 0.8
    assert rows["copy"]["figures"]["2048"]["begun"] > 0


@pytest.mark.long
def test_rows_with_servers_of_their_own_are_measured(tmp_path: Path) -> None:
    """With drafts a repeat finds as much as without; a model with windows holds what it holds under vLLM alone."""
    out = tmp_path / "gpu.json"
    with benchmark(out, ",".join(MORE)) as (process, _):
        pass
    rows = rows_of(out)
    assert process.returncode == 0
    assert [(name, row["not_measured"]) for name, row in rows.items() if "not_measured" in row] == []
    drafts, windows = (rows[name]["figures"] for name in MORE)
    for figures in (drafts, windows):
        assert figures["repeats"].keys() == {"warmpath", "vllm serve"}
        assert [row["share"] for row in figures["repeats"]["warmpath"]] == [1.0] * 5
    assert drafts["accepted"].keys() == {"warmpath", "vllm serve"}
    held = windows["held_blocks"]
    assert 0 < held["warmpath"]["held"] <= 1.05 * held["vllm serve"]["held"] < 0.9 * held["vllm serve"]["pool"]
    assert windows["predictions"]["exact_share"] > 0.95


@pytest.mark.parametrize("after", ["", "the first servers"])
def test_a_terminated_run_leaves_its_rows_and_no_process(after: str, tmp_path: Path) -> None:
    """While servers start, and while rows are measured."""
    out = tmp_path / "gpu.json"
    with benchmark(out, "first_token,decode") as (process, started):
        if after:
            eventually(lambda: after in rows_of(out), START_S)
        else:
            eventually(lambda: any("raylet" in words for words in started.running().values()))
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert after in {"", *rows_of(out)}


def test_a_killed_peer_costs_no_row_of_ours(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    with benchmark(out, "first_token,decode") as (_, started):
        eventually(lambda: "the first servers" in rows_of(out), START_S)
        (peer,) = (pid for pid, words in started.running().items() if "vllm.entrypoints" in words)
        psutil.Process(peer).kill()
    rows = rows_of(out)
    assert "it has ended" in rows["vllm serve"]["not_measured"]
    assert [row.keys() for row in rows["decode"]["figures"].values()] == [{"warmpath"}] * 3
