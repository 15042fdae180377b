"""The page in a browser, with tenants: each key sees its own part."""

from typing import Any

import pytest

from tests.browser import chromium
from tests.integration.conftest import PATIENCE_S
from tests.integration.demo.conftest import KEYS, Served

pytestmark = pytest.mark.integration

SYSTEM_BARS = ".bar[aria-label^='“The harbour opens']"
"""The test's system prompt, by the name that the sending page gives it."""


def test_the_page_shows_each_key_its_own_part(served: Served) -> None:
    """The second answer of a chat shows the reused tokens. Only its tenant and operators see the prefix on the map.

    A proxy that adds the operator's key to requests shows the page without a key in it.

    docs: monitoring
    """
    with chromium() as browser:

        def opened(key: str, map_key: str = "") -> Any:
            page = browser.new_context().new_page()
            page.set_default_timeout(1000 * PATIENCE_S)
            page.goto(served.url)
            for label, secret in (("API key", key), ("Key for the map", map_key)):
                page.get_by_label(label, exact=True).fill(secret)
                page.get_by_label(label, exact=True).press("Tab")
            page.locator(".replica").nth(1).wait_for()
            return page

        page = opened(KEYS["acme"][0], KEYS["operator"][0])
        page.locator("#system-fold summary").click()
        page.get_by_label("Text before every question").fill("The harbour opens at dawn. " * 60)
        page.get_by_label("Max. tokens").fill("8")
        for number, question in enumerate(("When does it open?", "And when not?")):
            page.get_by_label("Your message").fill(question)
            page.get_by_label("Your message").press("Enter")
            page.locator(".reuse").nth(number).get_by_text("reused:").wait_for()
            page.locator(".reuse").nth(number).get_by_text("replica").wait_for()
        reused = page.locator(".reuse .reused b").all_inner_texts()
        assert int(reused[0].removesuffix(" %")) < 50 < int(reused[1].removesuffix(" %"))
        page.locator(SYSTEM_BARS).first.wait_for()
        page.locator(".reuse button").nth(1).click()
        page.locator("#why td").first.wait_for()  # explained for the operator's key
        assert "cached" in page.locator("#why").inner_text()
        signed_in = browser.new_context(extra_http_headers=served.headers("operator")).new_page()  # as by a proxy
        signed_in.set_default_timeout(1000 * PATIENCE_S)
        signed_in.goto(served.url)
        signed_in.locator("#tenants-rows [data-tenant=acme]").wait_for()
        signed_in.locator("body.no-chat").wait_for()
        own, other = opened(KEYS["acme"][0]), opened(KEYS["globex"][0])
        held = page.locator(SYSTEM_BARS).first.get_attribute("data-id")
        own.locator(f".bar[data-id='{held}']").first.wait_for()
        assert other.locator(f".bar[data-id='{held}']").count() == 0
        assert "acme" not in other.content()
