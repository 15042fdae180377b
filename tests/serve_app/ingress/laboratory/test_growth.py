"""The cost of a request grows with its size and no faster, and the event loop never stands still for it.

Every field of every door grows by doubling, in every shape that a hostile client may give it. docs: isolation
"""

import asyncio
import gc
import os
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path

import pytest

from tests.serve_app.ingress.laboratory.doors import Door, Field, doors_of, query_names, reading
from tests.serve_app.ingress.laboratory.growth import (
    Growing,
    growing_fields,
    growing_forms,
    growing_heads,
    growing_paths,
)
from tests.serve_app.ingress.laboratory.house import House, opened
from tests.serve_app.ingress.laboratory.shapes import texts
from tests.serve_app.ingress.laboratory.watch import wrong_with
from tests.serve_app.tool_templates.families import family

PARTS = 16
"""Each takes ten minutes or more."""
QUICK_BYTES, MOST_BYTES, BODY_BYTES = 32 << 10, 256 << 10, 8 << 20


@pytest.fixture(scope="module")
def model(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family("hermes", demo_model_path, tmp_path_factory.mktemp("family") / "hermes")


async def found_in(
    house: House, growing: Iterable[Growing], most_bytes: int, whole_bytes: int = 0
) -> tuple[int, list[str]]:
    """Return how many were grown, and what is wrong. See ``wrong_with``."""
    tried, wrong = 0, []
    for one in growing:
        answers: list[str] = []

        async def work(size: int, one: Growing = one, answers: list[str] = answers) -> None:
            answers.append(await one.work(house, size))

        said = await wrong_with(work, min(most_bytes, one.most or most_bytes), 0 if one.most else whole_bytes)
        tried += 1
        said = next(filter(None, answers), "") or said
        if said:
            wrong.append(f"{one.name}: {said}")
        if not tried % 200:
            gc.collect(1)
    return tried, wrong


async def names_of(house: House, doors: list[Door]) -> tuple[list[str], list[str]]:
    """Return the names of the headers and the queries that doors look for."""
    with reading() as (headers, query):
        for door in doors:
            for growing in islice(chain(growing_fields(door, lambda *_: slice(0, 1)), growing_heads(door)), 5):
                await growing.work(house, 64)
    return sorted(headers), sorted(query | query_names())


LIKE_OTHERS = ("/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/cache/explain")
"""Doors whose bodies are those of others."""


def quickly(number: int, field: Field) -> slice:
    """Choose one or two shapes of a third of our fields, and of some others."""
    every = 3 if field.ours and field.door.path not in LIKE_OTHERS else 25
    return slice(0) if number % every else slice(number * 7 % 60, None, 60)


def test_a_field_grows_no_faster_than_its_size(model: Path, tmp_path: Path) -> None:
    """Some of every door, in one shape after the other."""

    async def run() -> tuple[int, list[str]]:
        async with opened(model, tmp_path) as house:
            gc.collect()
            gc.freeze()
            doors = doors_of(house.application)
            headers, query = await names_of(house, doors)
            units = sorted(texts())
            growing: list[Growing] = [*growing_paths(units[::12])]
            for number, door in enumerate(doors):
                growing += growing_fields(door, quickly)
                growing += [*growing_heads(door, headers, query, units[number % len(units) :][:1])][number % 9 :: 9]
                growing += [*growing_forms(door)][::5] if "form" in door.bodies else []
            return await found_in(house, growing, QUICK_BYTES)

    tried, wrong = asyncio.run(run())
    assert not wrong, "\n".join(wrong)
    assert tried > 500


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif("WARMPATH_WHOLE_LABORATORY" not in os.environ, reason="hours; make test-laboratory")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_field_in_every_shape(part: int, model: Path, tmp_path: Path) -> None:
    """Fields of our own bodies in all shapes, those of the clients' packages in a few."""

    def chosen(number: int, field: Field) -> slice:
        return slice(None) if field.ours else slice(number % 12, None, 12)

    async def run() -> tuple[int, list[str]]:
        async with opened(model, tmp_path) as house:
            gc.collect()
            gc.freeze()
            doors = doors_of(house.application)
            headers, query = await names_of(house, doors)
            units = sorted(texts())
            growing: list[Growing] = [] if part else [*growing_paths(units)]
            for number, door in enumerate(doors):
                if number % PARTS == part:
                    growing += growing_fields(door, chosen)
                    growing += growing_heads(door, headers, query, units[number % 3 :: 3])
                    growing += growing_forms(door) if "form" in door.bodies else []
            return await found_in(house, growing, MOST_BYTES, BODY_BYTES)

    tried, wrong = asyncio.run(run())
    print(f"{tried} fields and shapes")
    assert not wrong, "\n".join(wrong)
