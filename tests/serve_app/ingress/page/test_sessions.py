"""The table of sessions and the chat, in a browser: data, viewers, and no requests while hidden."""

from pathlib import Path
from typing import Any

import pytest

from tests.serve_app.ingress.page.scene import Event, recording, snapshot, write
from tests.serve_app.ingress.page.stage import Stage
from tests.serve_app.ingress.page.test_map import begin

ROWS = "#sessions-rows tr"
WHY = "It waits for space: live sessions hold 900 of 1,024 tokens, and it needs 640."


def session(name: str, state: str, **more: Any) -> Event:
    """A session in the form of docs: api."""
    told = {"replica": "r1", "session": name, "tenant": "acme", "state": state, "turns": 3, "tokens": 1200}
    return {**told, "own_tokens": 1200, "age_s": 300.0, "idle_s": 0.0, **more}


ALL = [
    session("00aa", "running", own_tokens=900),
    session("", "waiting", waited_s=12.0, why=WHY),
    session("00bb", "paused", idle_s=20.0, live_for_s=100.0, tenant="globex"),
    session("00cc", "left", idle_s=130.0, turns=1),
]


def table(page: Any) -> list[list[str]]:
    return [row.locator("td").all_inner_texts() for row in page.locator(ROWS).all()]


def asked_in_a_minute(page: Any, stage: Stage) -> int:
    """Let a minute pass for the page; return the number of its requests for sessions."""
    page.evaluate("() => fetch('v1/models')")  # earlier requests have reached the server
    before = len(stage.asked_sessions)
    page.clock.fast_forward(60_000)
    page.evaluate("() => fetch('v1/models')")
    return len(stage.asked_sessions) - before


@pytest.fixture
def opened(page: Any, stage: Stage) -> Any:
    """The page with the table open, and ``ALL`` in it."""
    stage.sessions[""] = ALL
    page.clock.install()
    begin(page, stage)
    page.locator("#sessions summary").click()
    page.locator(ROWS).nth(3).wait_for()
    return page


def test_each_session_shows_its_state_and_tokens(opened: Any) -> None:
    """A waiting session has its reason."""
    assert table(opened) == [
        ["00aa", "acme", "running", "1,200 (300 shared)", "3", "replica r1"],
        ["unnamed", "acme", f"waiting for 12.0 s. {WHY}", "1,200", "3", "replica r1"],
        ["00bb", "globex", "paused; its space is kept for 1 min 40 s", "1,200", "3", "replica r1"],
        ["00cc", "acme", "left 2 min 10 s ago", "1,200", "1", "replica r1"],
    ]
    assert opened.locator("#sessions-note").inner_text() == "1 running, 1 paused, 1 waiting, 1 left"


def test_the_table_is_updated_and_requested_only_while_it_is_open(page: Any, stage: Stage) -> None:
    stage.sessions[""] = ALL[:1]
    page.clock.install()
    begin(page, stage)
    assert asked_in_a_minute(page, stage) == 0
    page.locator("#sessions summary").click()
    page.locator(ROWS, has_text="00aa").wait_for()
    stage.sessions[""] = ALL[3:]
    assert asked_in_a_minute(page, stage) == 1
    page.locator(ROWS, has_text="00cc").wait_for()
    assert page.locator(ROWS).count() == 1
    page.locator("#sessions summary").click()
    page.wait_for_function("() => !document.querySelector('#sessions').open")
    assert asked_in_a_minute(page, stage) == 0


def test_the_chosen_model_answers_and_its_replicas_are_shown(page: Any, stage: Stage) -> None:
    """Another name of the same model changes the chat alone; the map, and who is asked, follow a choice of another."""
    stage.models = {"demo": "demo", "coder": "coder", "gpt-4o": "coder"}
    stage.sessions[""] = ALL[:1]
    now_s = begin(page, stage)
    page.locator("#model option").nth(2).wait_for(state="attached")
    assert page.locator("#model option").all_text_contents() == list(stage.models)
    stage.snapshots[""] = [snapshot(now_s, model="coder")]
    page.locator("#settings summary").click()
    for number, name in enumerate(("coder", "gpt-4o")):
        page.locator("#model").select_option(name)
        page.locator("#model-name", has_text="coder").wait_for()
        page.get_by_label("Your message").fill("Who are you?")
        page.get_by_label("Your message").press("Enter")
        page.locator(".reuse").nth(number).get_by_text("reused:").wait_for()
        assert stage.bodies[-1]["model"] == name
        assert stage.asked_models == ["", "coder"]


def test_another_key_sees_its_own_sessions_at_once(opened: Any, stage: Stage) -> None:
    """A refused key sees only the server's message, and none of the earlier data."""
    opened.get_by_text("Model and keys").click()
    stage.snapshots["wp-acme"] = stage.snapshots[""]
    stage.sessions["wp-acme"] = ALL[3:]
    for key, note, rows in (("wp-acme", "1 left", 1), ("wp-wrong", "Incorrect API key provided.", 0)):
        opened.get_by_label("Key for the map").fill(key)
        opened.get_by_label("Key for the map").press("Tab")
        opened.locator("#sessions-note", has_text=note).wait_for()
        assert opened.locator(ROWS).count() == rows
    assert stage.asked_sessions[-2:] == ["wp-acme", "wp-wrong"]


def test_a_recording_has_no_sessions(opened: Any, stage: Stage, tmp_path: Path) -> None:
    """The server's sessions are not those of that time; they return with live mode."""
    opened.locator("#recording-file").set_input_files(write(tmp_path / "run.jsonl", recording()))
    opened.locator("#sessions").wait_for(state="hidden")
    assert asked_in_a_minute(opened, stage) == 0
    stage.sessions[""] = ALL[:2]
    opened.get_by_role("button", name="Back to live").click()
    opened.locator("#sessions").wait_for(state="visible")
    opened.wait_for_function("() => document.querySelectorAll('#sessions-rows tr').length === 2")


def test_a_server_without_sessions_says_so(page: Any, stage: Stage) -> None:
    """This is the case inside Ray Serve LLM. (docs: monitoring)"""
    stage.no_sessions = True
    begin(page, stage)
    page.locator("#sessions summary").click()
    page.locator("#sessions-note", has_text="This server does not report sessions.").wait_for()


def test_names_of_sessions_are_never_markup(page: Any, stage: Stage) -> None:
    wrong = "<img src=x onerror=document.title='broken'>"
    stage.sessions[""] = [session(wrong, wrong, tenant=wrong)]
    begin(page, stage)
    page.locator("#sessions summary").click()
    page.locator(ROWS, has_text="<img").wait_for()
    assert page.locator("img").count() == 0
    assert page.title() == "warmpath"


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


def test_an_error_in_the_chat_is_seen(page: Any, stage: Stage) -> None:
    """It is scrolled into view, also for one who reads further up, and its text has the colour of trouble."""
    page.set_viewport_size({"width": 1366, "height": 700})
    begin(page, stage)
    stage.words = ["A long answer.\n"] * 60
    page.get_by_label("Your message").fill("Tell me all.")
    page.get_by_label("Your message").press("Enter")
    page.locator(".turn.assistant:not(.running) .reuse").wait_for()
    stage.fails = "Rate limit reached; retry after 5 s. " * 6
    asked: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: asked.append(route))
    page.get_by_label("Your message").fill("And then?")
    with page.expect_request("**/v1/chat/completions"):
        page.get_by_label("Your message").press("Enter")
    page.locator("#talk").evaluate("talk => { talk.scrollTop = 0; }")
    asked[0].continue_()
    page.locator(".trouble").wait_for()
    seen = """(trouble) => {
        const talk = document.getElementById("talk").getBoundingClientRect(), box = trouble.getBoundingClientRect();
        return talk.top <= box.top && box.bottom <= talk.bottom;
    }"""
    page.wait_for_function(f"() => ({seen})(document.querySelector('.trouble'))")
    colour = page.locator(".trouble").evaluate("one => getComputedStyle(one).color")
    assert colour != page.locator(".turn.assistant .said").first.evaluate("one => getComputedStyle(one).color")


@pytest.mark.parametrize(
    "message",
    [
        "No tenant has this API key; send a valid one as `Authorization: Bearer KEY`.",
        "An API key is needed; send it as `Authorization: Bearer KEY`.",
    ],
)
def test_a_refused_key_is_told_without_headers(page: Any, stage: Stage, message: str) -> None:
    """Those are for programs; a reader has a field for the key."""
    begin(page, stage)
    stage.fails = message
    page.get_by_label("Your message").fill("Hello?")
    page.get_by_label("Your message").press("Enter")
    page.locator(".trouble", has_text=f"{message.partition(';')[0]}. Paste your API key on the left.").wait_for()
    assert "Bearer" not in page.locator("body").inner_text()
