"""SIGKILL of processes that store responses: acknowledged changes are kept."""

import json
import subprocess
import sys
from pathlib import Path

KILLS = 200


def test_two_hundred_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Two writers share a file, as two ingresses do; stored responses stay, deleted ones stay deleted.

    docs: failures
    """
    command = [sys.executable, "-m", "tests.serve_app.stored.kills", str(tmp_path / "responses.sqlite"), str(KILLS)]
    counts = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=250).stdout)
    assert counts["kills"] == KILLS
    assert counts["stored"] >= KILLS // 2  # each round waits for at least one
    assert counts["deleted"] > 0
    assert counts["lost"] == 0
