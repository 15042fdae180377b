"""`python -m benchmarks agents`, a small run: real servers, tenants' keys, and a flood beside the agents."""

import json
from pathlib import Path

import pytest

from benchmarks.end_to_end import agents
from tests.integration.conftest import START

pytestmark = [pytest.mark.integration, pytest.mark.long]

FLAGS = "--engine simulated --model demo --sessions 3 --turns 3 --tenants 2 --tokens-per-id 2 --speed 1000"


@pytest.mark.parametrize("pool", ["2", "0"])  # of 0: whatever a machine's speed, it holds the largest request
def test_sessions_find_their_turns_beside_a_flood(tmp_path: Path, pool: str) -> None:
    """Every turn is answered, else it raises, and so is the flood. A pool of twice the working set keeps most turns."""
    report = tmp_path / "report.json"
    flags = [*FLAGS.split(), "--pool", pool, "--running", "3", "--flood", "5", "--runs", "1", "--json", str(report)]
    with START:
        agents.run(flags)
    results = json.loads(report.read_text())["results"]
    beside, alone = results["rows"]["beside the flood"], results["rows"]["alone"]
    assert beside["flood_answered"]["runs"] == [5]
    assert alone["flood_answered"]["runs"] == [0]
    if pool == "2":
        assert 0.3 < alone["hit_rate"]["p50"] <= results["reference"]["hit_rate"]
        assert results["hit_rate"]["ratio"] > 0.5
    assert len(results["reference"]["job_s"]) == 3
