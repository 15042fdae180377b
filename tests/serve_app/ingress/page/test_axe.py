"""Checks by axe-core: labels, roles, contrast. $WARMPATH_AXE is the path of its file, from `npm pack axe-core`."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve_app.ingress.page import scene
from tests.serve_app.ingress.page.scene import decision, figure, replica, snapshot
from tests.serve_app.ingress.page.stage import Stage
from tests.serve_app.ingress.page.test_sessions import say
from tests.serve_app.ingress.page.test_tenants import opened

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
    stage.tables = {"": scene.table(*scene.tenants(3), refusals=(scene.refused("globex"),))}
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


OVERLAPS = """() => {
  const inner = "td, th, button, li, table";
  const parts = `#tenants :is(${inner}, h3, dt, dd), .top :is(dt, dd, a), .replica :is(p, button), .legend li`;
  const seen = (one) => {
    const range = document.createRange();
    range.selectNodeContents(one);
    let { left, right, top, bottom } = range.getBoundingClientRect();
    for (let above = one; above; above = above.parentElement) {
      if (getComputedStyle(above).overflow === "visible") continue;
      const box = above.getBoundingClientRect();
      [left, right] = [Math.max(left, box.left), Math.min(right, box.right)];
      [top, bottom] = [Math.max(top, box.top), Math.min(bottom, box.bottom)];
    }
    return { one, left, right, top, bottom };
  };
  const boxes = [...document.querySelectorAll(parts)]
    .filter((one) => one.checkVisibility() && !one.querySelector(inner))
    .filter((one) => one.textContent.trim() && !one.closest("thead"))
    .map(seen)
    .slice(0, 600);
  const shared = (a, b, begin, end) => Math.min(a[end], b[end]) - Math.max(a[begin], b[begin]);
  const overlap = (a, b) => shared(a, b, "left", "right") > 1 && shared(a, b, "top", "bottom") > 1;
  const pairs = boxes.flatMap((a, at) => boxes.slice(at + 1).map((b) => [a, b]));
  return pairs
    .filter(([a, b]) => overlap(a, b) && !a.one.contains(b.one) && !b.one.contains(a.one))
    .map(([a, b]) => `${a.one.textContent} / ${b.one.textContent}`);
}"""
"""Returns the pairs of texts that lie on each other."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize(("viewer", "number"), [("operator", 3), ("operator", 200), ("tenant", 1)])
@pytest.mark.parametrize("replicas", [0, 2, 64])
def test_the_table_of_tenants_has_no_violations(
    page: Any, stage: Stage, axe: str, scheme: str, width: int, viewer: str, number: int, replicas: int
) -> None:
    """With an open row, and no text on another."""
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 900})
    there = [
        replica(f"r{at}", time.time(), blocks_by_owner={"acme": 100, "globex": 60}) for at in range(1, replicas + 1)
    ]
    opened(page, stage, max(number, 3), key=f"wp-{viewer}", viewer=viewer, replicas=there)
    page.locator("#tenants-rows .tenant-name").nth(min(1, number - 1)).click()
    page.locator(".tenant-detail h3").first.wait_for()
    assert found(page, axe) == []
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
