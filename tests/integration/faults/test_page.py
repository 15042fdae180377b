"""The page in a browser while a replica is killed: its card leaves, its successor's comes, and the chat goes on."""

from __future__ import annotations

import os
import signal

import pytest

from tests.browser import chromium
from tests.integration.conftest import PATIENCE_S, replicas_of, wait_for_replicas

pytestmark = pytest.mark.integration


def test_a_killed_replica_leaves_the_page_and_its_successor_comes(url: str) -> None:
    wait_for_replicas(url, 2, [])
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(1000 * PATIENCE_S)
        page.goto(url)
        before = replicas_of(url)
        for replica_id in before:
            page.locator(f".replica[data-id='{replica_id}']").wait_for()
        victim = next(iter(before))
        os.kill(int(before[victim]["pid"]), signal.SIGKILL)
        page.locator(f".replica[data-id='{victim}']").wait_for(state="detached")
        wait_for_replicas(url, 2, [victim])
        [successor] = replicas_of(url).keys() - before.keys()
        page.locator(f".replica[data-id='{successor}']").wait_for()
        page.get_by_label("Your message").fill("Is anybody left?")
        page.get_by_label("Your message").press("Enter")
        page.locator(".reuse").get_by_text("replica").wait_for()
