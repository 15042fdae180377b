"""A benchmark's servers end with it, and with all that they started."""

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.common.report import BenchmarkError
from benchmarks.common.server import ROOT, server_process

CHILD = "import subprocess, sys; print(subprocess.Popen(['sleep', '1000']).pid, file=open(sys.argv[1], 'w', 1)); "
BENCHMARK = """
import sys
from benchmarks.common.server import server_process
with server_process([sys.executable, "-c", sys.argv[1], sys.argv[2]], "http://127.0.0.1:1/never"):
    pass
"""


def wait_until_gone(pid: int) -> None:
    """Wait until a killed process has ended; its zombie may stay a while."""
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


def test_a_server_that_fails_leaves_none_of_its_processes(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    command = [sys.executable, "-c", f"{CHILD} sys.exit('no memory')", str(told)]
    with pytest.raises(BenchmarkError, match="no memory"), server_process(command, "http://127.0.0.1:1/never"):
        pass
    wait_until_gone(int(told.read_text()))


def test_a_terminated_benchmark_ends_its_server_and_what_that_started(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    child = f"{CHILD} import time; time.sleep(1000)"
    process = subprocess.Popen([sys.executable, "-c", BENCHMARK, child, str(told)], cwd=ROOT)
    while not (told.exists() and told.read_text().strip()):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    wait_until_gone(int(told.read_text()))
