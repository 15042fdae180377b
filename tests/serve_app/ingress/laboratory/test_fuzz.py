"""No header, path, query, body, form or text of a model gives a 5xx or a traceback: every door, by its grammar.

Who cannot be answered is told what to change (4xx), or to come again later (503, while replicas are silent).
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve_app.ingress.laboratory.doors import doors_of, query_names, reading, samples
from tests.serve_app.ingress.laboratory.grammar import Asked, requests, spoken
from tests.serve_app.ingress.laboratory.house import KEY, OPERATOR, House, Said, opened
from tests.serve_app.tool_templates.families import family

LATER = 503
PATIENCE_S = 60


class Room:
    """A house with a loop of its own, for examples that are drawn outside of it."""

    def __init__(self, runner: asyncio.Runner, house: House) -> None:
        self._runner = runner
        self.house = house
        self.doors = doors_of(house.application)
        with reading() as (headers, query):
            for door in self.doors:
                key = b"Bearer " + (OPERATOR if door.of_operators else KEY).encode()
                for body in [body for name in door.bodies for body in samples().get(name, [{}])[:3]] or [{}]:
                    raw = json.dumps(body).encode() if door.bodies else b""
                    self.ask(Asked(door, door.target(), [(b"authorization", key)], (raw,)))
        self.headers, self.query = sorted(headers), sorted(query | query_names())

    def ask(self, asked: Asked) -> Said:
        """Return the answer."""
        answer = self.house.ask(asked.door.method, asked.target, asked.headers, asked.parts, key="")
        return self._runner.run(asyncio.wait_for(answer, PATIENCE_S))


@pytest.fixture(scope="module")
def room(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    folder = tmp_path_factory.mktemp("laboratory")
    model = family("hermes", demo_model_path, folder / "hermes")
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        house = runner.run(stack.enter_async_context(opened(model, folder)))
        yield Room(runner, house)
        runner.run(stack.aclose())


def test_every_door_and_what_it_looks_for_is_known(room: Room) -> None:
    """The laboratory finds them in the application, so a new one is tried without a change here."""
    assert {"/v1/chat/completions", "/v1/files", "/health", "/docs"} <= {door.path for door in room.doors}
    assert {"authorization", "x-api-key", "content-type", "x-claude-code-session-id"} <= {*room.headers}
    assert {"limit", "after", "start_date", "once", "window_s", "starting_after"} <= {*room.query}
    assert not [name for door in room.doors for name in door.bodies if name != "form" and name not in samples()]


def _check(room: Room, asked: Asked) -> None:
    room.house.complaints.texts.clear()
    said = room.ask(asked)
    assert 200 <= said.status < 500 or said.status == LATER, (asked, said)
    assert not room.house.complaints.texts, (asked, room.house.complaints.texts)


def _some(examples: int) -> settings:
    return settings(max_examples=examples, suppress_health_check=[*HealthCheck], database=None)


LONG = (pytest.mark.long, pytest.mark.timeout(1800))
MANY = [pytest.param(1_000, id=f"1000 of 10000, part {part}", marks=LONG) for part in range(10)]


@pytest.mark.parametrize("examples", [300, *MANY])
def test_any_request_gets_a_sentence(room: Room, examples: int) -> None:
    """Bodies, paths, queries, headers and forms that are nearly right."""

    @_some(examples)
    @given(requests(room.doors, room.headers, room.query))
    def asks(asked: Asked) -> None:
        _check(room, asked)

    asks()


@pytest.mark.parametrize("examples", [40, pytest.param(1_000, marks=LONG)])
def test_whatever_the_model_says_is_an_answer(room: Room, examples: int) -> None:
    """Whole and streamed, with tools and without."""
    doors = {door.path: door for door in room.doors if door.bodies}
    bodies = [
        (doors[path], json.dumps({**body, **extra}).encode())
        for path, name in (
            ("/v1/chat/completions", "ChatBody"), ("/v1/responses", "ResponsesBody"), ("/v1/messages", "MessagesBody")
        )
        for body in samples()[name][:1]
        for extra in ({"stream": True}, {"stream": False}, {"stream": True, "tools": [], "tool_choice": None})
    ]  # fmt: skip

    @_some(examples)
    @given(spoken(), st.sampled_from(bodies), st.integers(1, 5))
    def says(text: str, body: tuple[object, bytes], step: int) -> None:
        room.house.script.text, room.house.script.step = text, step
        door, raw = body
        _check(room, Asked(door, door.target(), [(b"authorization", b"Bearer " + KEY.encode())], (raw,)))  # type: ignore

    try:
        says()
    finally:
        room.house.script.clear()
