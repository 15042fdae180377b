"""The front door's benchmark keeps our row if the peer does not start."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.common.server import ROOT
from tests.integration.conftest import START


def test_a_peer_that_does_not_start_costs_no_row_of_ours(tmp_path: Path) -> None:
    out = tmp_path / "front_door.json"
    sizes = "--runs 1 --replicas 1 --clients 2 --max-tokens 4 --short-requests 2 --long-requests 1"
    command = [sys.executable, "-m", "benchmarks", "front_door", *sizes.split(), "--vllm-python", "/bin/false"]
    with START:
        subprocess.run([*command, "--json", str(out)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=280)
    results = json.loads(out.read_text())["results"]
    assert results["warmpath"]["spread"]["streamed"]["us_a_token"]["ingress"]["p50"] > 0
    assert "did not come up" in results["vllm serve"]["not_measured"]
