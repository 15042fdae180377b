"""Checks by axe-core: labels, roles, contrast. $WARMPATH_AXE is the path of its file, from `npm pack axe-core`."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve_app.ingress.page.scene import decision, figure, replica, snapshot
from tests.serve_app.ingress.page.stage import Stage
from tests.serve_app.ingress.page.test_sessions import say

AXE = Path(os.environ.get("WARMPATH_AXE", "nowhere"))

pytestmark = pytest.mark.skipif(not AXE.is_file(), reason="set WARMPATH_AXE to axe.min.js, from `npm pack axe-core`")


@pytest.fixture(scope="module")
def axe() -> str:
    return AXE.read_text()


def found(page: Any, axe: str) -> list[str]:
    page.wait_for_timeout(700)  # until colours have faded
    page.evaluate(axe)  # without a script element, because the page forbids them
    wrong = page.evaluate("async () => (await axe.run(document, { resultTypes: ['violations'] })).violations")
    return [f"{each['id']}: {node['target']} {node['failureSummary']}" for each in wrong for node in each["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("replicas", [0, 2, 64])
def test_there_are_no_violations(page: Any, stage: Stage, axe: str, scheme: str, width: int, replicas: int) -> None:
    """The page shows alarms, lists, an answer that was cut off, and details; later, it has lost the server."""
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 900})
    now_s = time.time()
    refused = [{"accepted": False, "why": "rps: there is no such setting", "processes": 3, "at_s": now_s}]
    row = figure(now_s, refused=3, failed=1)
    more = {
        "configuration": refused,
        "figures": [row],
        "minute": row,
        "rates": {"tokens": "tokens/s"},
        "ingresses": 2,
        "links": ["docs", "metrics"],
    }
    told = [decision("one.0", now_s)]
    there = [replica(f"r{number}", now_s, node="berth-7", gpu="0") for number in range(1, replicas + 1)]
    left = {"type": "replica_left", "at_s": now_s, "replica": "r99", "number": 99, "lost": True}
    stage.snapshots = {"": [snapshot(now_s, replicas=there, decisions=told, incidents=[left], **more)]}
    page.goto("/")
    page.locator("#alarms").wait_for()
    stage.ends, stage.thoughts = "length", ["Let me think."]
    say(page, "May I?")
    page.locator(".cut").wait_for()
    page.locator("#incidents button").first.click()
    page.locator("#why h4").wait_for()
    assert found(page, axe) == []
    stage.mute = True
    page.locator("body.stale").wait_for()
    assert found(page, axe) == []


def test_there_are_no_violations_without_a_key(page: Any, stage: Stage, axe: str) -> None:
    stage.snapshots = {"wp-right": []}
    page.goto("/")
    page.get_by_role("button", name="Enter a key").wait_for()
    assert found(page, axe) == []
