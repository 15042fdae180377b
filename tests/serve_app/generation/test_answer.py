"""Choices of one answer run as its place allows, and give back what they took however they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from serve_app.errors import GenerationFailed
from serve_app.fairness.shares import Budget, Shares
from serve_app.fairness.waiting_line import WaitingLine
from serve_app.generation.answer import STARTED_AT_ONCE, ChoiceReader, Piece, answer_pieces, choice_pieces
from serve_app.generation.generation import Generation, Tokens
from tests.serve_app.generation.fake_replicas import generation

PLACES = 10
"""Of the line; two tenants, so a share is half of them."""


class Letters:
    """A detokenizer for which a token is a letter."""

    def push(self, token_ids: tuple[int, ...]) -> str:
        return "".join(chr(97 + token) for token in token_ids)

    def flush(self) -> str:
        return ""


class Source:
    """Answers three tokens, in three rounds of the loop; remembers how many ran at once and who was closed early."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.running = self.most = self.ended = 0

    async def generate(self, generation: Generation) -> AsyncGenerator[Tokens, None]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for token in range(3):
                await asyncio.sleep(0)
                if generation.request_id == self.failing:
                    raise GenerationFailed("broken")
                yield Tokens((token,), 0 if not token else None, "length" if token == 2 else None)
        finally:
            self.running -= 1
            self.ended += 1


async def run(choices: int, source: Source, stop_after: int | None = None) -> tuple[list[Piece], int]:
    """Return the pieces, as many as are wanted, and what the line's budget has in use afterwards."""
    budget = Budget(Shares({"a": 1.0, "b": 1.0}), lambda: PLACES)
    place = await WaitingLine(budget).enter("a", choices, 1)
    generations = [replace(generation(), request_id=f"r.{index}") for index in range(choices)]
    pieces: list[Piece] = []

    def reader(index: int, generation: Generation) -> ChoiceReader:
        return ChoiceReader(index, generation, Letters())  # type: ignore[arg-type]

    try:
        async with aclosing(answer_pieces(generations, source, reader, place)) as stream:
            async for piece in stream:
                pieces.append(piece)
                if len(pieces) == stop_after:
                    break
    except GenerationFailed:
        pass
    return pieces, budget.used


@pytest.mark.parametrize("choices", [1, 2, STARTED_AT_ONCE, 5, 23])
def test_as_many_choices_run_as_there_are_places(choices: int) -> None:
    """All are answered whole, never more at once than the place has units, and nothing is held afterwards."""
    source = Source()
    pieces, used = asyncio.run(run(choices, source))
    texts = {index: "".join(piece.text for piece in pieces if piece.index == index) for index in range(choices)}
    assert texts == dict.fromkeys(range(choices), "abc")
    assert source.most <= min(choices, PLACES // 2)
    assert (used, source.running, source.ended) == (0, 0, choices)


@pytest.mark.parametrize("choices", [1, 23])
def test_leaving_ends_what_was_begun_and_begins_no_more(choices: int) -> None:
    """A consumer that stops after the first piece leaves nothing running, and no unit taken."""
    source = Source()
    pieces, used = asyncio.run(run(choices, source, stop_after=1))
    assert len(pieces) == 1
    assert (used, source.running) == (0, 0)
    assert source.ended <= PLACES // 2


@pytest.mark.parametrize("choices", [1, 23])
def test_one_failing_choice_ends_all(choices: int) -> None:
    """An answer is whole or none; the others are closed and every unit is given back."""
    source = Source(failing=f"r.{choices - 1}")
    pieces, used = asyncio.run(run(choices, source))
    assert not any(piece.finish_reason for piece in pieces if piece.index == choices - 1)
    assert (used, source.running) == (0, 0)


@pytest.mark.parametrize("sizes", [(6,), (1, 5), (4, 2), (2, 1, 3), (1, 1, 1, 1, 1, 1)])
def test_usage_counts_no_token_behind_a_stop_string(sizes: tuple[int, ...]) -> None:
    """Text, reason and count are the same however many tokens come at once, as after a resend they do."""

    class Chunks:
        async def generate(self, generation: Generation) -> AsyncGenerator[Tokens, None]:
            sent = 0
            for size in sizes:
                sent += size
                yield Tokens(tuple(range(sent - size, sent)), None, "length" if sent == 6 else None)

    async def read() -> list[Piece]:
        reader = ChoiceReader(0, generation(), Letters(), ("de",))  # type: ignore[arg-type]
        stream = choice_pieces(generation(), Chunks(), reader)
        return [piece async for piece in stream]

    pieces = asyncio.run(read())
    assert "".join(piece.text for piece in pieces) == "abc"
    assert sum(piece.new_tokens for piece in pieces) == 5
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
