"""CacheAwareRouter in real Ray Serve, in both of its loop modes: an application in each, with processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import START

pytestmark = pytest.mark.integration

PROGRAM = Path(__file__).with_name("request_router_app.py")


def test_every_request_reaches_the_replica_that_holds_its_prefix() -> None:
    """300 at once, and calls within one parent request, which do not wait for each other; none is left reserved.

    The replica sees the reservation that the ingress finds under the request's id; calls without a route reach some
    replica.
    """
    root = PROGRAM.parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with START:
        done = subprocess.run(
            [sys.executable, str(PROGRAM)], env=environment, cwd=root, capture_output=True, text=True, timeout=600
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    outcomes: dict[str, dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    for mode, outcome in outcomes.items():
        assert outcome == {
            "router_in_separate_loop": mode == "default",
            "sent": 300,
            "right": 300,
            "same_decision": 300,
            "nested": 16,
            "unkeyed": 8,
            "faults": 0,
            "open_reservations": 0,
        }
