"""Log lines are in Serve's file at once, at the level they were logged at, whichever logger they came from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT

_REPLICA = """
import asyncio, logging, os, signal, sys
from ray.serve._private.common import ServeComponentType
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig
from serve_app.logs import log_at_once

def configure(number, **config):
    configure_component_logger(
        component_name="Replica", component_id=str(number), component_type=ServeComponentType.REPLICA,
        logging_config=LoggingConfig(logs_dir=sys.argv[1], **config), max_bytes=1 << 30, backup_count=1,
        buffer_size=1000,  # of Serve's throughput mode
    )

configure(1)
logging.getLogger("ray.serve").info("before")
log_at_once()
log_at_once()  # a process has one log, however many ask for it
if sys.argv[2] == "changed":
    configure(2, encoding="JSON")  # what Serve does for a logging_config that changes
logging.getLogger("ray.serve").info("an access line")
print("printed")
logging.getLogger("serve_app.replica").info("not shown by default")
logging.getLogger("router.feed").warning("a feed is late: %d", 7)
logging.getLogger("ray.serve").warning("Serve warns")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("serve_app.engine").exception("a step failed")
asyncio.new_event_loop().call_exception_handler({"message": "nobody asked"})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module", params=["text", "changed"])
def crashed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The log of a replica's process that was killed right after its last line."""
    folder = tmp_path_factory.mktemp("logs")
    command = [sys.executable, "-c", _REPLICA, str(folder), request.param]
    env = {**os.environ, "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == -9, ended.stderr
    return "".join(path.read_text() for path in sorted(Path(folder).glob("*.log")))


def test_a_crash_loses_no_line(crashed: str) -> None:
    for line in ("before", "an access line", "printed", "a feed is late: 7", "Serve warns", "a step failed"):
        assert crashed.count(line) == 1, crashed
    assert "ZeroDivisionError: division by zero" in crashed and "nobody asked" in crashed
    assert "not shown" not in crashed


def test_lines_keep_their_level(crashed: str) -> None:
    """A search for ERROR finds errors: they are no INFO of stderr."""
    levels = {"a feed is late": "WARNING", "Serve warns": "WARNING", "a step failed": "ERROR", "nobody asked": "ERROR"}
    for words, level in levels.items():
        (line,) = (line for line in crashed.splitlines() if words in line)
        assert level in line and "INFO" not in line, line
