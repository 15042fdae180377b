"""Signals end a start at once and a service in order, in any state of the instance; nothing of it remains."""

import os
import subprocess
import sys
from pathlib import Path
from signal import SIGINT, SIGTERM, Signals

import psutil
import pytest

from serve_app.cli.processes import runs
from tests.harness.eventually import eventually

_SUPERVISOR = """
import sys
from rich.console import Console
from serve_app.cli.supervisor import Launch, Supervisor
launch = Launch({}, "127.0.0.1", 1, False, 1, False)
command = [sys.executable, "-c", sys.argv[1]]
sys.exit(Supervisor(Console(stderr=True, highlight=False), float(sys.argv[2]), float(sys.argv[3])).run(launch, command))
"""

_INSTANCE = """
import io, json, os, signal, subprocess, sys, time
channel = io.FileIO(0, "r+", closefd=False)
launch = json.loads(channel.readline())
signal.signal(signal.SIGTERM, signal.SIG_IGN)
log = os.open(launch["log"], os.O_WRONLY)
terminal = os.fdopen(os.dup(2), "w")
os.dup2(log, 2)
print("noise of a library", file=sys.stderr)
def say(text):
    print(text, file=terminal, flush=True)
def serve():
    channel.write(b"serving\\n")
    say("hello")
def detached():
    subprocess.run(["sh", "-c", "setsid sleep 600 </dev/null >/dev/null &"])  # it holds the terminal
open(launch["run_dir"] + "/file", "w").close()
"""


class Started:
    """A supervisor with an instance of a few lines of Python, and its output."""

    def __init__(self, instance: str, tmp_path: Path, shutdown_timeout_s: float = 600, margin_s: float = 600) -> None:
        self.tmp_path = tmp_path
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SUPERVISOR, _INSTANCE + instance, str(shutdown_timeout_s), str(margin_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )

    def wait_for(self, word: str) -> None:
        """Read lines until one contains a word."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if word in line:
                return
        raise AssertionError(f"it never said {word!r}")

    def rest(self) -> str:
        output, _ = self.process.communicate()
        return output

    @property
    def left_over(self) -> list[str]:
        return [path.name for path in self.tmp_path.iterdir()]


_GIVEN_UP = 'os.dup2(terminal.fileno(), 2); detached(); say("[1/4]"); time.sleep(600)'
_ORPHANS = """
line = "setsid sleep 0 </dev/null >/dev/null 2>&1 & echo $!"
pid = subprocess.run(["sh", "-c", line], capture_output=True, text=True).stdout.strip()
while os.path.exists("/proc/" + pid):
    time.sleep(0.01)
serve(); channel.readline()
"""
_BUSY = 'serve(); channel.readline(); say("asked"); time.sleep(600)'


@pytest.mark.parametrize(
    ("instance", "signals", "end", "status"),
    [
        (_GIVEN_UP, {"[1/4]": SIGTERM}, "stopping: the start is given up\nstopped\n", 128 + SIGTERM),
        ('serve(); say(channel.readline() == b"stop\\n")', {"hello": SIGINT}, "ends them now\nTrue\nstopped\n", 0),
        (_ORPHANS, {"hello": SIGTERM}, "answers under way have 600 s; Ctrl-C again ends them now\nstopped\n", 0),
        (_BUSY, {"hello": SIGTERM, "asked": SIGINT}, "stopping at once\nstopped\n", 128 + SIGINT),
    ],
    ids=["start", "serving", "orphans", "stopping"],
)
def test_a_signal_ends_it_at_any_moment(
    tmp_path: Path, instance: str, signals: dict[str, Signals], end: str, status: int
) -> None:
    """A signal ends a start at once with all its processes, and a service in order, until a second signal.

    Processes that a killed replica left behind stay zombies until the instance ends. docs: failures
    """
    made = Started(instance, tmp_path)
    for word, number in signals.items():
        made.wait_for(word)
        made.process.send_signal(number)
    output = made.rest()
    assert output.endswith(end)
    assert "Traceback" not in output, "it was interrupted before it was ready for that"
    assert "noise" not in output
    assert made.process.returncode == status
    assert made.left_over == []


@pytest.mark.parametrize(
    ("instance", "sentence"),
    [
        ('say("error: it broke"); sys.exit(1)', "error: it broke\n"),
        ("sys.exit(3)", "error: the instance ended without a word\n"),
        ("serve(); os.kill(os.getpid(), 9)", "error: the instance ended without a word\n"),
    ],
    ids=["failed", "silent", "killed"],
)
def test_failures_are_reported(tmp_path: Path, instance: str, sentence: str) -> None:
    """A failure leaves a log with the details.

    docs: failures
    """
    made = Started(instance, tmp_path)
    output = made.rest()
    assert sentence in output
    assert made.process.returncode == 1
    (name,) = made.left_over
    assert f"{made.tmp_path / name} (--verbose shows it here)" in output
    assert "noise" in (made.tmp_path / name).read_text()


def test_one_that_does_not_stop_is_ended(tmp_path: Path) -> None:
    made = Started("serve(); channel.readline(); time.sleep(600)", tmp_path, 0, 0.5)
    made.wait_for("hello")
    made.process.send_signal(SIGINT)
    assert "it does not stop in time" in made.rest()
    assert made.process.returncode == 1


_LOYAL = """
import threading
from serve_app.cli.instance import _take_orders
child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
threading.Thread(target=_take_orders, args=(channel, launch["run_dir"], threading.Event()), daemon=True).start()
say(f"{os.getpid()} {child.pid} {child.stdout.readline()}")
time.sleep(600)
"""


def test_an_instance_ends_with_its_supervisor(tmp_path: Path) -> None:
    """The supervisor may die in any way: its process sees the end of its orders, and ends everything.

    docs: failures
    """
    made = Started(_LOYAL, tmp_path)
    assert made.process.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in made.process.stdout.readline().split()]
    made.process.kill()
    made.process.wait()
    eventually(lambda: not any(map(runs, processes)))
    assert not [name for name in made.left_over if not name.endswith(".log")]


_PREPARING = """
import sys, time
from rich.console import Console
from serve_app.cli.supervisor import giving_up
with giving_up(Console(stderr=True, highlight=False)):
    try:
        print("fetching", flush=True)
        time.sleep(600)
    finally:
        print("removed what was half made", flush=True)
"""


@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
def test_a_signal_while_the_model_is_made_interrupts_that(number: Signals) -> None:
    """The words and the status are those of a later signal. docs: failures"""
    process = subprocess.Popen(
        [sys.executable, "-c", _PREPARING], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "fetching\n"
    process.send_signal(number)
    output, _ = process.communicate()
    assert output == "removed what was half made\nstopping: the start is given up\nstopped\n"
    assert process.returncode == 128 + number
