"""The chat of the page, in a browser: it streams, it can be stopped, and shows the reused tokens."""

from typing import Any

from tests.serve_app.ingress.page.stage import Stage


def say(page: Any, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.get_by_label("Your message").press("Enter")


def load_sample(page: Any) -> None:
    page.get_by_role("button", name="Load a sample document").click()
    page.wait_for_function("() => document.querySelector('#say').value")


def test_an_answer_streams_and_the_second_shows_the_reused_tokens(page: Any, stage: Stage) -> None:
    """The sample document makes the first question long; the second answer shows the tokens not computed again."""
    page.goto("/")
    load_sample(page)
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
    say(page, "Go on forever")
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
    """The page asks for a missing key, reports a wrong one at once, and keeps the right one over a reload."""
    stage.snapshots = {"wp-right": []}
    page.goto("/")
    page.get_by_text("Paste your API key on the left.").wait_for()
    page.locator("#settings-note", has_text="an API key is needed").wait_for()
    page.get_by_role("button", name="Enter a key").click()
    assert page.evaluate("document.activeElement.id") == "key"
    page.keyboard.type("wp-wrong")
    page.keyboard.press("Tab")
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


def test_an_answer_that_was_cut_off_can_be_continued(page: Any, stage: Stage) -> None:
    """It continues in the same turn, as the model's last message. The next request has the complete text."""
    page.goto("/")
    stage.ends = "length"
    say(page, "May I?")
    page.locator(".cut", has_text="cut off at 4 tokens").wait_for()
    stage.words, stage.ends = [" And", " more."], "stop"
    page.get_by_role("button", name="Continue").click()
    page.get_by_text("Yes, you may. And more.", exact=True).wait_for()
    page.wait_for_function("() => !document.querySelector('.running')")
    assert page.locator(".cut").count() == 0
    assert stage.bodies[1]["messages"][-1] == {"role": "assistant", "content": "Yes, you may."}
    assert (stage.bodies[1]["continue_final_message"], stage.bodies[1]["add_generation_prompt"]) == (True, False)
    stage.ends = "length"
    say(page, "And then?")
    page.locator(".cut").wait_for()
    assert stage.bodies[2]["messages"][1]["content"] == "Yes, you may. And more."
    say(page, "Another")
    page.locator(".cut").nth(1).wait_for()
    assert page.get_by_role("button", name="Continue").count() == 1, "only the last answer can be continued"


def test_the_page_shows_that_a_long_prompt_is_being_read(page: Any, stage: Stage) -> None:
    """It shows the number of tokens. After a short wait it shows nothing."""
    page.goto("/")
    load_sample(page)
    stage.reading.set()
    page.get_by_role("button", name="Send").click()
    page.locator(".reading", has_text="reading 2,247 tokens").wait_for()
    page.locator("#spoken", has_text="reading 2,247 tokens").wait_for(state="attached")
    stage.reading.clear()
    page.get_by_text("Yes, you may.", exact=True).wait_for()
    assert page.locator(".reading").count() == 0


def test_reasoning_is_shown_during_streaming_and_folded_afterwards(page: Any, stage: Stage) -> None:
    """It is neither part of the answer nor sent with the next question."""
    page.goto("/")
    stage.thoughts = ["Let me", " think."]
    stage.held.clear()
    stage.words = ["Yes."]
    say(page, "May I?")
    page.locator(".reasoning[open]", has_text="Let me think.").wait_for()
    stage.held.set()
    page.locator(".reasoning:not([open]) summary", has_text="reasoned for").wait_for()
    page.get_by_text("Yes.", exact=True).wait_for()
    page.locator(".reuse").wait_for()
    say(page, "And then?")
    page.locator(".reuse").nth(1).wait_for()
    assert stage.bodies[1]["messages"][1] == {"role": "assistant", "content": "Yes."}
