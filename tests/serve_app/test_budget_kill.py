"""A budget over four processes of ingresses, one of which is killed with SIGKILL and begins again."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.budget_life import ANSWER, BUDGET, PROMPT
from tests.integration.conftest import eventually
from tests.serve_app.test_budgets import ingress, tenant, used

CLIENTS = 200


@pytest.mark.long
def test_little_is_spent_past_a_budget_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    """One answer, a thousandth for each ingress, and what the one that died had answered and not counted."""

    noon_s = str(time.time())

    def begin(number: int) -> subprocess.Popen[bytes]:
        life = [
            sys.executable,
            "-m",
            "tests.harness.budget_life",
            str(tmp_path / "db"),
            str(tmp_path / f"{number}.sent"),
        ]
        return subprocess.Popen([*life, str(CLIENTS // 4), noon_s])

    def answered() -> int:
        return sum(int(line) for file in tmp_path.glob("*.sent") for line in file.read_text().splitlines())

    lives = [begin(number) for number in range(4)]
    eventually(lambda: answered() >= 0.4 * BUDGET)
    lives[0].kill()
    lives[0].wait()
    lives[0] = begin(0)
    assert [life.wait() for life in lives] == [0] * 4
    counted = int(asyncio.run(used(ingress(tmp_path / "db", tenant(tokens=BUDGET, period="day")))))
    print(json.dumps({"answered": answered(), "counted": counted, "past the budget": answered() - BUDGET}))
    assert BUDGET <= counted <= 1.004 * BUDGET + PROMPT + ANSWER
    assert 0 <= answered() - counted <= 0.01 * BUDGET
