"""A pytest plugin that keeps CI's clock: files run in a given order, and none begins after a moment.

``.ci/rest.py`` sets it: the environment names a folder with ``order`` (test files, one a line), the moment after which
no file begins, and a later one after which no test begins. Each worker writes what became of its tests there.
"""

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

FOLDER, FILES_UNTIL, TESTS_UNTIL = "WARMPATH_CI_FOLDER", "WARMPATH_CI_FILES_UNTIL", "WARMPATH_CI_TESTS_UNTIL"


class Clock:
    """One worker's tests."""

    def __init__(self, folder: Path, files_until_s: float, tests_until_s: float) -> None:
        order = (folder / "order").read_text().split()
        self._places = {file: place for place, file in enumerate(order)}
        self._files_until_s, self._tests_until_s = files_until_s, tests_until_s
        self._told = (folder / f"{os.getpid()}.jsonl").open("a")
        self._begun: set[str] = set()

    def _tell(self, item_id: str, what: str, amount: float = 0.0) -> None:
        print(json.dumps([item_id.split("::")[0], what, amount]), file=self._told, flush=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort by the order of files; tests of one file stay as they are. Every worker tells the same counts."""
        for file, count in Counter(item.nodeid.split("::")[0] for item in items).items():
            self._tell(file, "collected", count)
        items.sort(key=lambda item: self._places.get(item.nodeid.split("::")[0], len(self._places)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Leave out a test whose file would begin too late; it is named at the end."""
        file, now_s = item.nodeid.split("::")[0], time.time()
        if now_s < (self._tests_until_s if file in self._begun else self._files_until_s):
            self._begun.add(file)
            return None
        self._tell(item.nodeid, "left")
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what became of a part of a test: its setup, itself, its teardown, after which it has ended."""
        self._tell(report.nodeid, report.outcome, report.duration)
        if report.when == "teardown":
            self._tell(report.nodeid, "ended")


def pytest_configure(config: Any) -> None:
    """Keep the clock in the processes that run tests: xdist's workers, or the only one."""
    if FOLDER in os.environ and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        moments = (float(os.environ[name]) for name in (FILES_UNTIL, TESTS_UNTIL))
        config.pluginmanager.register(Clock(Path(os.environ[FOLDER]), *moments))
