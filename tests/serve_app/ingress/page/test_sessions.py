"""The table of sessions, in a browser: its data, its viewers, and no requests while it is hidden."""

from pathlib import Path
from typing import Any

import pytest

from tests.serve_app.ingress.page.scene import Event, recording, write
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
        ["00aa", "acme", "running", "1,200 (300 shared)", "3", "replica 1"],
        ["unnamed", "acme", f"waiting for 12.0 s. {WHY}", "1,200", "3", "replica 1"],
        ["00bb", "globex", "paused; its space is kept for 1 min 40 s", "1,200", "3", "replica 1"],
        ["00cc", "acme", "left 2 min 10 s ago", "1,200", "1", "replica 1"],
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
