"""The top of the page, in a browser: alarms, the last 15 minutes, and their playback."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serve_app.ingress.page.scene import Event, decision, figure, node, recording, replica, snapshot, write
from tests.serve_app.ingress.page.stage import Stage
from tests.serve_app.ingress.page.test_map import bars, begin, lines

CONNECTION = Path(__file__).parents[4] / "serve_app/ingress/page/live/connection.js"


def alarm(page: Any, text: str) -> Any:
    return page.locator("#alarms li", has_text=text)


def left(name: str, at_s: float, *, lost: bool = True) -> Event:
    return {"type": "replica_left", "at_s": at_s, "replica": name, "number": int(name[1:]), "lost": lost}


def test_a_healthy_instance_has_no_alarm(page: Any, stage: Stage) -> None:
    begin(page, stage)
    assert not page.locator("#alarms").is_visible()


def test_a_lost_replica_is_shown_for_a_minute(page: Any, stage: Stage) -> None:
    """Its card and an alarm show the time, also in a page that opens later. A stopped replica disappears at once."""
    now_s = begin(page, stage)
    stage.send(replica("r3", now_s, state="joining"), replica("r2", now_s, state="lost", report_age_s=4.0))
    alarm(page, "Replica r2 was lost at").wait_for()
    lost = page.locator("[data-id=r2] .replica-state").inner_text()
    stage.send({**left("r2", now_s + 2), "report_age_s": 6.0})
    page.locator("[data-id=r2] .tree:not(:has(.bar))").wait_for()
    assert page.locator("[data-id=r2] .replica-state").inner_text() == lost, "the time of the last report"
    assert lines(page, "incidents") == ["Replica r2 was lost"]
    assert alarm(page, "Replica r3 is joining.").count() == 1
    page.locator("#alarms-spoken", has_text="Replica r2 was lost").wait_for(state="attached")
    page.get_by_role("button", name="replica r2", exact=True).click()
    assert "It was lost" in page.locator("#why").inner_text()
    stage.send(replica("r1", now_s + 63))
    page.locator("[data-id=r2]").wait_for(state="detached")
    stage.send(left("r1", time.time(), lost=False))
    page.locator("[data-id=r1]").wait_for(state="detached")
    assert lines(page, "incidents")[0] == "Replica r1 left"
    now_s = time.time()
    stage.snapshots = {"": [snapshot(now_s, replicas=[replica("r1")], incidents=[left("r2", now_s - 5)])]}
    page.reload()
    page.locator("[data-id=r2].lost").wait_for()


def test_a_model_at_zero_is_asleep_and_no_alarm(page: Any, stage: Stage) -> None:
    """Until a request starts it; a fixed number of replicas that is none is an alarm. (docs: autoscaling)"""
    stopped = {"from": 1, "target": 0, "reason": "load_fell", "at_s": 0.0}
    now_s = time.time()
    stage.snapshots = {"": [snapshot(now_s, replicas=[], from_zero=True, scale=stopped)]}
    page.goto("/")
    page.locator("#empty-lead", has_text="The model is asleep").wait_for()
    assert not page.locator("#alarms").is_visible()
    stage.send({"type": "scale", "at_s": now_s, "from": 0, "target": 1, "reason": "work", "why": "1 request waits"})
    alarm(page, "No replica is running yet. Requests wait for the first one.").wait_for()
    assert page.locator("#alarms li.bad").count() == 0
    assert page.locator("#empty-lead").inner_text() == "No replicas yet"
    stage.send(replica("r1", now_s))
    page.locator("#alarms").wait_for(state="hidden")
    stage.send(left("r1", now_s, lost=False), {"type": "scale", "at_s": now_s, **stopped})
    page.locator("#empty-lead", has_text="The model is asleep").wait_for()
    assert not page.locator("#alarms").is_visible()
    never: Event = {"from": 1, "target": 1, "reason": "hold", "at_s": now_s - 301}
    for more in ({}, {"from_zero": True, "scale": never}):
        stage.snapshots = {"": [snapshot(time.time(), replicas=[], **more)]}
        page.reload()
        alarm(page, "No replica is running, so no request can be answered.").wait_for()
        assert page.locator("#alarms li.bad").count() == 1


def test_a_lost_server_is_shown_within_three_seconds(page: Any, stage: Stage) -> None:
    """Even with an open connection, the page turns grey, by the times in its code. It recovers with the next byte."""
    begin(page, stage)
    stage.mute = True
    alarm(page, "There is no connection to the server. The page shows the state at").wait_for()
    waits_ms = re.findall(r"const (?:LOST_MS|LOOK_EVERY_MS) = (\d+);", CONNECTION.read_text())
    assert len(waits_ms) == 2 and sum(map(int, waits_ms)) < 3000
    page.locator("body.stale").wait_for()
    assert page.locator("[data-id=r1] .replica-state").inner_text() == "was serving"
    stage.mute = False
    page.locator("body:not(.stale)").wait_for()
    assert page.locator("[data-id=r1] .replica-state").inner_text() == "serving"
    assert not page.locator("#alarms").is_visible()
    stage.busy = "Too many streams; close one."
    stage.hang_up()
    alarm(page, "Too many streams; close one. The page shows the state at").wait_for()
    page.locator("body.stale").wait_for()


def test_an_operator_sees_each_problem(page: Any, stage: Stage) -> None:
    """Each problem has one line, which disappears when the problem is fixed."""
    refused = {"accepted": False, "why": "rps: there is no such setting", "processes": 3, "at_s": 5.0}
    moved = {"accepted": True, "why": "in another trust group: acme", "processes": 1, "at_s": 6.0}
    now_s = begin(page, stage, configuration=[refused, moved], ingresses=2, ingresses_heard=1)
    alarm(page, "rps: there is no such setting").wait_for()
    alarm(page, "1 of 2 ingresses answers").wait_for()
    stage.send(replica("r2", now_s, report_age_s=3.4), replica("r1", now_s, without=["turns", "shares"]))
    alarm(page, "Replica r2 has not reported since").wait_for()
    alarm(page, "Replica r1 goes without shares, turns: vLLM differs there").wait_for()
    row = figure(now_s, refused=12, failed=1, refused_by={"ingress: tokens_per_minute": 12})
    stage.send({"type": "totals", "at_s": now_s, "totals": [], "figures": [row], "minute": row})
    alarm(page, "12 requests were refused (429) in the last minute: 12 by ingress: tokens_per_minute.").wait_for()
    alarm(page, "1 request failed (5xx) in the last minute").wait_for()
    assert page.locator("#alarms li").count() == 6
    stage.send(
        {"type": "configuration", "at_s": now_s, "configuration": []},
        {"type": "ingresses_heard", "at_s": now_s, "ingresses_heard": 2},
        replica("r1", now_s),
        replica("r2", now_s),
        {"type": "totals", "at_s": now_s, "totals": [], "figures": [figure(now_s)], "minute": figure(now_s)},
    )
    page.locator("#alarms").wait_for(state="hidden")
    assert lines(page, "incidents") == [
        "All ingresses answer",
        "A user_config moved tenants to other trust groups",
        "A user_config was refused",
    ]


def test_the_header_shows_the_last_15_minutes(page: Any, stage: Stage) -> None:
    """The server has kept them since before this tab, so a second tab shows the same."""
    now_s = time.time()
    rows = [figure(now_s - 10 * at, prompt_tokens=400, cached_tokens=300) for at in range(90)]
    total = {"tenant": "acme", "requests": 9, "prompt_tokens": 1000, "cached_tokens": 100}
    begin(page, stage, figures=rows, minute=rows[0], totals=[total])
    page.locator("#vital-rate", has_text="4.").wait_for()
    assert page.locator("#vital-ttft").inner_text() == "21 ms · 340 ms"
    assert page.locator("#vital-errors").inner_text() == "0"
    assert "p95 at most 340 ms" in page.locator("#spark-ttft").get_attribute("aria-label")
    drawn = page.locator("#spark-rate .spark-0").get_attribute("d")
    assert drawn.count("L") > 85, "one line without a gap"
    assert page.locator("#vital-reused").inner_text() == "75 %"
    assert page.locator("#vital-reused-label").inner_text() == "prompts reused, last minute"
    stage.snapshots = {"": [snapshot(now_s, replicas=[replica("r1")], totals=[total])]}
    page.reload()
    page.locator("#vital-replicas", has_text="1").wait_for()
    assert page.locator("#vital-reused").inner_text() == "10 %"
    assert page.locator("#vital-replicas-label").inner_text() == "replica"
    assert page.locator("#vital-ttft").inner_text() == "–"


def test_the_server_names_counters_that_are_shown_by_second(page: Any, stage: Stage) -> None:
    """Each has a label and a curve. An older server, or recording, names none."""
    now_s = time.time()
    rows = [figure(now_s - 10 * at, tokens=600) for at in range(90)]
    begin(page, stage, figures=rows, minute=rows[0], rates={"tokens": "tokens/s", "odd": "odd/s"})
    assert re.fullmatch(r"6\d|7\d", page.locator("#vital-tokens").inner_text())
    assert page.locator("#vital-tokens-label").inner_text() == "tokens/s"
    assert "at most" in page.locator("#spark-tokens").get_attribute("aria-label")
    assert page.locator("#vital-odd").inner_text() == "0.0"
    stage.snapshots = {"": [snapshot(now_s, replicas=[replica("r1")])]}
    page.reload()
    page.locator("#vital-replicas-label", has_text="replica").wait_for()
    assert page.locator(".vital-more").count() == 0


def test_lists_are_separate_and_survive_a_reconnection(page: Any, stage: Stage) -> None:
    """Hundreds of requests do not hide an incident, and a new snapshot does not list events twice.

    A replica with nothing to copy is none, as at the first start.
    """
    now_s = time.time()
    cold = {
        "kind": "prewarm",
        "replica": "r2",
        "state": "done",
        "blocks": 0,
        "at_s": now_s - 20,
        "skipped_blocks": {"time": 9},
    }
    warm = {"kind": "prewarm", "replica": "r1", "state": "done", "blocks": 12, "at_s": now_s - 30}
    joined = {"type": "joined", "at_s": now_s - 29, "replica": "r1", "number": 1}
    told = [decision("old.0", now_s - 50)]
    alone = {"kind": "prewarm", "replica": "r3", "state": "done", "blocks": 0, "peers": 2, "at_s": now_s - 40}
    begin(page, stage, moves=[warm, cold, alone], incidents=[joined, left("r9", now_s - 10)], decisions=told)
    wanted = [
        "Replica r9 was lost",
        "Replica r2 joined cold: it copied nothing",
        "Replica r1 joined warm: it copied 192 tokens from other replicas",
    ]
    assert lines(page, "incidents") == wanted
    assert lines(page, "requests") == ["acme: 1,200 tokens to replica r1, 99 % reused"]
    stage.send(*(decision(f"flood{at}.0", now_s + at / 100) for at in range(300)))
    page.wait_for_function("() => document.querySelectorAll('#requests li').length > 3")
    assert page.locator("#requests li").count() < 12, "a sample"
    stage.hang_up()
    page.wait_for_function("() => document.querySelectorAll('#requests li').length > 3")
    page.locator("#connection[data-state=live]").wait_for()
    assert lines(page, "incidents") == wanted


def test_a_miss_is_listed_with_its_advice(page: Any, stage: Stage) -> None:
    """Its line has the cause and the cost; the panel says what would have kept the prefix, and where it broke."""
    now_s = begin(page, stage)
    told = {"request": "r1.0", "tenant": "acme", "reason": "time", "lost_tokens": 1240, "part": "system", "line": 3}
    stage.send({"type": "miss", "at_s": now_s, **told, "advice": "a date changes. Move it <b>back</b>."})
    page.locator("#requests button", has_text="acme: 1,240 tokens computed again (time)").click()
    shown = page.locator("#why").inner_text()
    assert "A date changes. Move it <b>back</b>." in shown and "1,240 tokens" in shown and "system" in shown


def test_prompts_of_this_page_are_named_by_their_first_words(page: Any, stage: Stage) -> None:
    """The events have no text, so only this page knows it. With one tenant, colours are by prompt."""
    held = {"r1": 512}
    system = node("s-one", None, 0, 256, held, kind="system", tenant="default")
    first = node("c-one", "s-one", 256, 256, held, tenant="default", kind="conversation")
    other = node("c-two", "s-one", 256, 128, held, tenant="default", kind="conversation")
    now_s = begin(page, stage, prefixes=[system, first, other])
    assert bars(page, "r1") == ["system prompt, 512 tokens", "conversation, 512 tokens", "conversation 2, 512 tokens"]
    assert page.locator("#colour-by").inner_text() == "Prompt"
    page.locator("#system-fold summary").click()
    page.get_by_label("Text before every question").fill("You advise on berths and tides, and name the ship first.")
    page.get_by_label("Your message").fill("When does the harbour open?")
    page.get_by_label("Your message").press("Enter")
    page.locator(".reuse").wait_for()
    stage.send(decision("answer1.0", now_s, node="c-one", tenant="default"))
    page.locator(".bar[aria-label^='“You advise on berths']").wait_for()
    assert bars(page, "r1")[1:] == ["“When does the harbour open?”, 512 tokens", "conversation 2, 512 tokens"]
    assert "berths" not in str(stage.snapshots)


def test_cards_show_a_replicas_node_and_its_cached_tokens(page: Any, stage: Stage) -> None:
    """The card also shows the capacity, and the pool by owner on its own scale. Replicas have one name everywhere."""
    held = {"acme": 128, "(public)": 64}
    begin(page, stage, replicas=[replica("r1", node="berth-7", gpu="0", blocks_by_owner=held), replica("r2")])
    card = page.locator("[data-id=r1]")
    assert card.locator(".replica-place").inner_text() == "berth-7 · GPU 0"
    assert "4.8K of 8.2K tokens cached" in card.locator(".replica-load").inner_text()
    assert card.locator(".replica-name").inner_text() == "replica r1"
    assert page.locator("#pool-legend").inner_text().split() == ["Pool:", "in", "use", "cached", "free"]
    assert card.locator(".owners").get_attribute("aria-label") == "Of the pool: acme 25 %, (public) 13 %"
    widths = [part.bounding_box()["width"] for part in card.locator(".owners span").all()]
    assert abs(widths[0] / sum(widths) - 128 / 512) < 0.02, "the rest of the pool is free"


def open_file(page: Any, path: Path) -> None:
    page.goto("/")
    page.locator("#recording-file").set_input_files(path)


def wait_for_replicas(page: Any, names: list[str]) -> None:
    page.wait_for_function(
        """(names) => {
          const cards = [...document.querySelectorAll('.replica:not(.gone)')];
          return cards.map((card) => card.dataset.id).join() === names;
        }""",
        arg=",".join(names),
    )


def test_any_moment_can_be_reached_forward_and_back(page: Any, stage: Stage, tmp_path: Path) -> None:
    """The page shows the state after the events up to that moment, regardless of direction."""
    open_file(page, write(tmp_path / "run.jsonl", recording()))
    scrub = page.get_by_label("Time in the recording")
    for at_s, names in ((0, ["r1", "r2"]), (30, ["r1", "r2", "r3"]), (55, ["r1", "r2"]), (30, ["r1", "r2", "r3"])):
        scrub.fill(str(at_s))
        wait_for_replicas(page, names)
    assert page.locator("#requests button").first.inner_text().startswith("0:29")
    assert page.locator("#clock").inner_text() == "0:30 / 1:00"
    scrub.fill("10")
    wait_for_replicas(page, ["r1", "r2"])
    assert page.locator("[data-id=r1] .bar").count() == 4


def test_it_plays_pauses_and_moves_by_keyboard(page: Any, stage: Stage, tmp_path: Path) -> None:
    """Space plays and pauses, arrows and Home move, and a screen reader announces the time."""
    open_file(page, write(tmp_path / "run.jsonl", recording()))
    scrub = page.get_by_label("Time in the recording")
    scrub.focus()
    page.get_by_label("Speed").select_option("30")
    scrub.press(" ")
    page.get_by_role("button", name="Pause").wait_for()
    page.locator("#incidents", has_text="Replica r3 left").wait_for()
    page.get_by_role("button", name="Play").wait_for()
    assert page.locator("#clock").inner_text() == "1:00 / 1:00"
    scrub.press("Home")
    assert scrub.get_attribute("aria-valuetext") == "0:00 of 1:00"
    for _ in range(20):
        scrub.press("ArrowRight")
    later = float(scrub.input_value())
    assert 0 < later < 60
    scrub.press("ArrowLeft")
    assert float(scrub.input_value()) < later


def test_live_events_continue_behind_a_recording(page: Any, stage: Stage, tmp_path: Path) -> None:
    """They are hidden meanwhile. Back in live mode, the page shows the current state and the events since then."""
    stage.snapshots = {"": [snapshot(replicas=[], prefixes=[], scale={"from": 1, "target": 2, "at_s": 0.0})]}
    open_file(page, write(tmp_path / "run.jsonl", recording()))
    wait_for_replicas(page, ["r1", "r2"])
    stage.send(replica("r7"))
    page.get_by_role("button", name="Back to live").click()
    wait_for_replicas(page, ["r7"])
    assert not page.locator("#player").is_visible()
    assert lines(page, "incidents") == ["Replica r7 joined", "The autoscaler scales from 1 to 2 replicas"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("no json\n", "Line 1 of run.jsonl is not an event"),
        ('{"type": "decision", "at_s": 1}\n', "has no snapshot"),
        ('{"type": "snapshot", "at_s": 1}\n{"type": "prefixes", "at_s": 2}\n', "Line 2 of run.jsonl"),
        ('{"type": "snapshot", "at_s": 1, "decisions": [null]}\n{}\n', "Line 1 of run.jsonl"),
        pytest.param(" " * (64 << 20) + "\n", "the limit is 64 MiB", id="too large"),
    ],
)
def test_a_broken_file_gets_a_sentence(page: Any, stage: Stage, tmp_path: Path, text: str, sentence: str) -> None:
    """The earlier display stays."""
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    open_file(page, path)
    page.locator("#why", has_text="This file cannot be played").wait_for()
    assert sentence in page.locator("#why").inner_text()
    assert not page.locator("#player").is_visible()


def test_half_a_line_and_unknown_events_are_ignored(page: Any, stage: Stage, tmp_path: Path) -> None:
    """A killed recorder leaves half a line; a type may equal the name of a property that every object has."""
    strange = [{"type": word, "at_s": 5.0} for word in ("from_the_future", "constructor", "toString", "__proto__")]
    path = write(tmp_path / "run.jsonl", [*recording(), *strange])
    path.write_text(path.read_text() + '{"type": "deci')
    open_file(page, path)
    page.get_by_label("Time in the recording").fill("30")
    wait_for_replicas(page, ["r1", "r2", "r3"])


def test_playing_equals_seeking(page: Any, stage: Stage, tmp_path: Path) -> None:
    """Stepping a model there and back over checkpoints gives the same state as going there at once."""
    events = [*recording(), *(decision(f"more{at}.0", 60 + at / 50) for at in range(2000))]
    open_file(page, write(tmp_path / "run.jsonl", events))
    equal = page.evaluate(
        """async (events) => {
          const { Recording } = await import("./page/live/recording.js");
          const { Cache } = await import("./page/live/cache.js");
          const seen = ({ model }) => JSON.stringify(
            [[...model.replicas], [...model.nodes], model.decisions, model.nowS]);
          const walked = new Recording(structuredClone(events), () => new Cache());
          for (const atS of [100, 3, 70, 69.5, 22, 23, 24.6, 51, 0, 99, 40]) walked.to(atS);
          const straight = new Recording(structuredClone(events), () => new Cache());
          straight.to(40);
          return [walked.checkpoints.length > 5, seen(walked) === seen(straight)];
        }""",
        events,
    )
    assert equal == [True, True]
