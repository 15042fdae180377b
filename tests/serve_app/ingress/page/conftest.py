"""One browser for the tests of the page, if a browser is installed."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser import chromium
from tests.serve_app.ingress.page.stage import Stage, staged

PATIENCE_MS = 60_000


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """The scope is small, because the driver's event loop runs in this thread and blocks other tests' loops."""
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Stage]]:
    with staged() as one:
        yield one


@pytest.fixture
def stage(served: tuple[str, Stage]) -> Stage:
    served[1].reset()
    return served[1]


@pytest.fixture
def page(browser: Any, served: tuple[str, Stage], stage: Stage) -> Iterator[Any]:
    """A blank tab; any error in its console fails the test."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, base_url=served[0])
    tab = context.new_page()
    tab.set_default_timeout(PATIENCE_MS)
    wrong: list[str] = []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    # Refused requests are logged there too. Some tests cause them on purpose.
    tab.on(
        "console",
        lambda said: wrong.append(said.text) if said.type == "error" and "Failed to load" not in said.text else None,
    )
    yield tab
    context.close()
    assert wrong == []
