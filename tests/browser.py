"""A headless Chromium for tests of the page, where there is one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOW = "the page's tests need Chromium and its driver: apt-get install chromium; pip install '.[browser]'"


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser; a test that asks for it is skipped, with a sentence, where there is none."""
    driver = pytest.importorskip("playwright.sync_api", reason=HOW)
    if CHROMIUM is None:
        pytest.skip(HOW)
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()
