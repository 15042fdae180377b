"""``/docs`` in a browser, on an ingress with a scripted engine."""

import json
from pathlib import Path
from typing import Any

from tests.serve_app.ingress.page.conftest import PATIENCE_MS
from tests.serve_app.ingress.scripted import scripted


def test_a_chat_is_tried_out_with_a_key(browser: Any, demo_model_path: Path) -> None:
    """Nothing comes from another site, and the policy of the page's content forbids nothing that it needs."""
    with scripted(demo_model_path) as (url, script):
        script.text = "Hello"
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        asked: list[str] = []
        wrong: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.goto(f"{url}/docs")
        page.get_by_role("button", name="Authorize").click()
        page.locator(".modal-ux input").fill("wp-secret")
        page.locator(".modal-ux button.authorize").click()
        page.locator(".modal-ux .btn-done").click()
        chat = page.locator(".opblock", has_text="/v1/chat/completions").first
        chat.locator(".opblock-summary-control").click()
        chat.get_by_role("button", name="Try it out").click()
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
        chat.locator("textarea").fill(json.dumps(body))
        with page.expect_response("**/v1/chat/completions") as answered:
            chat.get_by_role("button", name="Execute").click()
        assert answered.value.json()["choices"][0]["message"]["content"] == "Hello"
        assert answered.value.request.headers["authorization"] == "Bearer wp-secret"
        assert answered.value.request.post_data_json == body
        chat.locator(".live-responses-table").get_by_text("Hello").first.wait_for()
        page.close()
    assert wrong == []
    assert {one.startswith((f"{url}/", "data:")) for one in asked} == {True}
