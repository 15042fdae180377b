"""The exact-resume contract (docs: failures): after any breaks, an answer equals the undisturbed one.

Real engines, dispatcher, router and preparation of requests; Hypothesis chooses the tokens at which calls break.
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.crashes.calls import MOST_BREAKS, CallCrashes, break_calls
from tests.harness.crashes.engines import call_crashes
from tests.harness.crashes.questions import Broken, Questions, Reply

BREAKS = st.lists(st.lists(st.integers(0, 33), max_size=MOST_BREAKS), min_size=1, max_size=6)
"""For each choice, the numbers of tokens after which its calls break."""


@pytest.fixture(scope="module")
def simulated(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CallCrashes]:
    directory = tmp_path_factory.mktemp("crashes")
    with call_crashes("simulated", demo_model_path, directory, random.Random(0)) as crashes:
        yield crashes


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), stops=st.booleans(), breaks=BREAKS)
def test_an_answer_whose_calls_break_is_the_undisturbed_one(
    simulated: CallCrashes, seed: int, stops: bool, breaks: list[list[int]]
) -> None:
    """Text, finish reasons, their order and usage, for every option at once; simulated tokens. (docs: failures)"""

    async def ask() -> tuple[Reply | Broken, Reply | Broken]:
        drawn = Questions(random.Random(seed))
        question = drawn.draw()
        wanted, generations = await simulated.prepare(question)
        expected = await simulated.answer(wanted, generations)
        if stops:
            assert isinstance(expected, Reply)
            wanted, _ = await simulated.prepare(drawn.with_stops(question, expected))
            expected = await simulated.answer(wanted, generations)
        return expected, await simulated.answer(wanted, generations, breaks)

    expected, got = asyncio.run(ask())
    assert isinstance(expected, Reply)
    assert got == expected


def test_the_real_engines_answers_survive_breaks(demo_model_path: Path, tmp_path: Path) -> None:
    """The same holds for the real model in float32, with adapters: nothing is lost or cut.

    Nothing is altered either, because no two likeliest tokens of these answers are so close that rounding swaps them.
    """
    rng = random.Random(11)
    with call_crashes("torch", demo_model_path, tmp_path, rng) as crashes:
        compared = asyncio.run(break_calls(crashes, Questions(rng, has_logits=True), rng, 20))
    assert len(compared) >= 16
    assert [answers for answers in compared if len(set(answers)) > 1] == []


def test_an_altered_answer_is_found(simulated: CallCrashes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: without sending the received tokens, answers differ."""
    monkeypatch.setattr("serve_app.generation.dispatch._resumed", lambda generation, *_: generation)
    rng = random.Random(3)
    compared = asyncio.run(break_calls(simulated, Questions(rng), rng, 20))
    assert all(isinstance(alone, Reply) and alone == under_load for alone, under_load, _ in compared)
    assert any(alone != with_breaks for alone, _, with_breaks in compared)
