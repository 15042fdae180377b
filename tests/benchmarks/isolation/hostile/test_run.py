"""Flags, the table, and what is read of an instance's metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.isolation.hostile.attacks import ATTACKS
from benchmarks.isolation.hostile.neighbours import KINDS_IN_TURN
from benchmarks.isolation.hostile.run import NAMES, checkout_of, parse, table_of
from benchmarks.isolation.hostile.stage import in_use

METRICS = """# HELP warmpath_num_requests_running warmpath num requests running
warmpath_num_requests_running{replica="a"} 2.0
warmpath_num_requests_running{replica="b"} 1.0
warmpath_num_requests_waiting{replica="a"} 4.0
warmpath_kv_cache_blocks{replica="a",state="used"} 10.0
warmpath_kv_cache_blocks{replica="a",state="cached"} 500.0
warmpath_kv_cache_blocks{replica="b",state="used"} 3.0
"""


def test_all_scenarios_run_unless_some_are_named() -> None:
    assert parse([]).scenarios == list(NAMES)
    assert parse(["--scenarios", "leavers,half_open"]).scenarios == ["leavers", "half_open"]
    with pytest.raises(SystemExit):
        parse(["--scenarios", "sabotage"])


def test_another_checkout_brings_its_own_python_unless_one_is_named() -> None:
    assert checkout_of(None, Path("x")) is None
    own = checkout_of(Path("/other"), None)
    assert own is not None
    assert own.command() == ["/other/.venv/bin/python", "/other/.venv/bin/warmpath"]
    named = checkout_of(Path("/other"), Path("/env/bin/python"))
    assert named is not None
    assert named.command()[1] == "/env/bin/warmpath"


def test_what_runs_waits_and_is_held_is_summed_over_replicas() -> None:
    assert in_use(METRICS) == (7, 13)
    assert in_use("") is None, "an instance that says nothing has not been seen empty"


def test_neighbours_meet_every_attack() -> None:
    assert {name for name, _ in KINDS_IN_TURN} == set(ATTACKS)


def test_every_bar_has_a_row_and_so_has_what_broke() -> None:
    bars = [{"bar": "first", "value": 0.5, "held": False}, {"bar": "second", "value": None, "held": True}]
    results = {
        "simulated": {
            "leavers": {"bars": bars, "held": False},
            "half_open": {"broke": "RuntimeError: it fell", "bars": [], "held": False},
            "one_tenant": {"bars": [], "held": None},
        }
    }
    table = table_of(results)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table)
    said = captured.get()
    assert table.row_count == 4
    for told in ("first", "second", "NO", "yes", "it fell"):
        assert told in said
