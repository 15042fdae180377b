"""The chat of the page, in a browser: it streams, it can be stopped, and shows the reused tokens."""

from typing import Any

from tests.serve_app.ingress.page.stage import Stage


def say(page: Any, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.get_by_label("Your message").press("Enter")


def test_an_answer_streams_and_the_second_shows_the_reused_tokens(page: Any, stage: Stage) -> None:
    """The sample document makes the first question long; the second answer shows the tokens not computed again."""
    page.goto("/")
    page.get_by_role("button", name="Load a sample document").click()
    stage.held.clear()
    page.get_by_role("button", name="Send").click()
    page.get_by_text("Yes, you", exact=True).wait_for()
    stage.held.set()
    page.get_by_text("Yes, you may.", exact=True).wait_for()
    page.get_by_text("0 % reused").wait_for()
    say(page, "And give it away?")
    page.locator(".reuse").nth(1).get_by_text("reused:").wait_for()
    shown = page.locator(".reuse").nth(1).inner_text()
    prompt = len(str(stage.bodies[0]["messages"])) // 4
    assert prompt > 2000
    assert "98 % reused" in shown or "99 % reused" in shown or "97 % reused" in shown
    assert "First token after" in shown
    roles = [message["role"] for message in stage.bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert "Apache License" in stage.bodies[1]["messages"][0]["content"]


def test_stop_ends_the_answer_at_the_server_too(page: Any, stage: Stage) -> None:
    """The text so far stays, and the next question can be asked."""
    page.goto("/")
    stage.held.clear()
    say(page, "Go on for ever")
    page.get_by_text("Yes, you", exact=True).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped").wait_for()
    assert stage.left.wait(60)
    stage.held.set()
    say(page, "Again")
    page.get_by_text("Yes, you may.", exact=True).wait_for()


def test_an_error_is_a_sentence(page: Any, stage: Stage) -> None:
    """The sentence is the server's own, and it is announced."""
    page.goto("/")
    stage.fails = "Rate limit reached; retry after 5 s."
    say(page, "Hello")
    assert page.get_by_role("alert").inner_text() == "Rate limit reached; retry after 5 s."


def test_text_is_never_markup(page: Any, stage: Stage) -> None:
    """A model may write anything, and so may a user."""
    page.goto("/")
    stage.words = ["<img src=x onerror=document.title='broken'>", "<script>document.title='broken'</script>", "."]
    say(page, "<b>bold</b>")
    page.locator(".reuse").wait_for()
    assert page.locator("#turns img, #turns script, #turns b:not(.reuse b)").count() == 0
    assert page.get_by_text("<b>bold</b>", exact=True).count() == 1
    assert page.title() == "warmpath"


def test_keys_stay_in_the_tab(page: Any, stage: Stage) -> None:
    """A wrong key is reported at once; the right one is sent, survives a reload, and is gone with the tab."""
    stage.snapshots = {"wp-right": []}
    page.goto("/")
    page.get_by_text("Incorrect API key provided.").first.wait_for()
    page.get_by_label("API key", exact=True).fill("wp-right")
    page.get_by_label("API key", exact=True).press("Tab")
    page.locator("#settings-note", has_text="demo").wait_for()
    page.reload()
    page.locator("#settings-note", has_text="demo").wait_for()
    say(page, "Hello")
    page.locator(".reuse").wait_for()
    assert stage.keys == ["wp-right"]
    assert page.evaluate("JSON.stringify({...localStorage}) + document.cookie") == "{}"
    assert page.evaluate("sessionStorage.getItem('warmpath.key')") == "wp-right"
