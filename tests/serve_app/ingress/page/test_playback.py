"""A recorded file, played in a browser: any moment of it, forward and back."""

from pathlib import Path
from typing import Any

import pytest

from tests.serve_app.ingress.page.scene import decision, recording, replica, snapshot, write
from tests.serve_app.ingress.page.stage import Stage
from tests.serve_app.ingress.page.test_map import lines


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
    page.locator("#incidents", has_text="Replica 3 left").wait_for()
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
    assert lines(page, "incidents") == ["Replica 7 joined", "The autoscaler scales from 1 to 2 replicas"]


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
