"""What a recorder writes is what the stream said, across a break, and in a form that the page reads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.common.report import BenchmarkError
from benchmarks.end_to_end.recorder import beside, recorded
from tests.serve_app.ingress.page.scene import decision, snapshot
from tests.serve_app.ingress.page.stage import staged


def wait_until(so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_events_are_written_one_a_line_also_after_a_break(tmp_path: Path) -> None:
    """A line separator inside a string is no end of a line; after a break comes a snapshot of its own."""
    path = tmp_path / "deep" / "run.jsonl"
    strange = decision("one.0", 2.0, tenant="a\u2028b")
    with staged() as (url, stage):
        stage.snapshots = {"wp-operator": [snapshot(1.0)]}
        with recorded(url, path, "wp-operator"):
            wait_until(lambda: stage.listening("wp-operator"))
            stage.send(strange, key="wp-operator")
            wait_until(lambda: path.read_bytes().count(b"\n") == 2)
            stage.hang_up()
            wait_until(lambda: stage.listening("wp-operator"))
            stage.send(decision("two.0", 3.0), key="wp-operator")
            wait_until(lambda: path.read_bytes().count(b"\n") == 4)
    events = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    assert events == [snapshot(1.0), strange, snapshot(1.0), decision("two.0", 3.0)]


def test_nothing_to_record_is_a_sentence(tmp_path: Path) -> None:
    """Before anything runs: a wrong key, or a server without events."""
    with staged() as (url, stage):
        stage.snapshots = {"wp-operator": [snapshot(1.0)]}
        with pytest.raises(BenchmarkError, match="answered 401"), recorded(url, tmp_path / "run.jsonl", "wp-wrong"):
            pass
    with recorded("http://127.0.0.1:9", None):
        pass


def test_each_of_several_runs_has_a_file() -> None:
    assert beside(Path("out/run.jsonl"), "ours", 2) == Path("out/run.ours.jsonl")
    assert beside(Path("out/run.jsonl"), "ours", 1) == Path("out/run.jsonl")
    assert beside(None, "ours", 2) is None
