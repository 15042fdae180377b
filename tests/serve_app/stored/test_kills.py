"""SIGKILL of processes that store responses: what was acknowledged is there."""

import json
import subprocess
import sys
from pathlib import Path

KILLS = 200


def test_two_hundred_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Two writers of one file at a time, as two ingresses are; stored responses stay, deleted ones stay away.

    docs: failures
    """
    command = [sys.executable, "-m", "tests.serve_app.stored.kills", str(tmp_path / "responses.sqlite"), str(KILLS)]
    counts = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=250).stdout)
    assert counts["kills"] == KILLS
    assert counts["stored"] >= KILLS // 2  # each round waits for one at least
    assert counts["deleted"] > 0
    assert counts["lost"] == 0
