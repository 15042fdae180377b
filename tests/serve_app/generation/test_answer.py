"""Choices of one answer run as its place allows, and return its units however they end.

Text, tokens and logprobs are the same for any number of tokens per chunk.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import accumulate, cycle, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from serve_app.api.format import ToldToken
from serve_app.engine.protocol import (
    EngineOutput,
    EngineRequest,
    FirstToken,
    SamplingParams,
    TakeAtOnce,
    TokenLogprob,
    TokenRules,
)
from serve_app.errors import GenerationFailed
from serve_app.fairness.queue import LoopTurns, WaitingLine
from serve_app.fairness.shares import Budget, Shares
from serve_app.generation.answer import (
    ChoiceReader,
    Piece,
    PieceSink,
    PromptTokens,
    answer_pieces,
    choice_pieces,
)
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.harness.eventually import let_others_run
from tests.serve_app.generation.fake_replicas import generation
from tests.serve_app.generation.outputs import output

PLACES = 10
"""Places of the queue; with two tenants, a share is half of them."""


class Letters:
    """A detokenizer that makes each token a letter."""

    def push(self, token_ids: tuple[int, ...]) -> str:
        return "".join(chr(97 + token) for token in token_ids)

    def flush(self) -> str:
        return ""


class Source:
    """Answers three tokens, in three rounds of the loop; records the most running at once, and ended calls."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.running = self.most = self.ended = 0

    async def generate(
        self, generation: EngineRequest, *, at_once: TakeAtOnce | None = None
    ) -> AsyncGenerator[EngineOutput, None]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for token in range(3):
                await let_others_run()
                if generation.request_id == self.failing:
                    raise GenerationFailed("broken")
                yield output((token,), FirstToken(0) if not token else None, "length" if token == 2 else None)
        finally:
            self.running -= 1
            self.ended += 1


async def run(choices: int, source: Source, stop_after: int | None = None) -> tuple[list[Piece], list[int]]:
    """Return the wanted number of pieces, and the budget's use at each of them and afterwards."""
    budget = Budget(Shares({"a": 1.0, "b": 1.0}), lambda: PLACES)
    place = await WaitingLine(budget).enter("a", choices, 1)
    generations = [structs.replace(generation(), request_id=f"r.{index}") for index in range(choices)]
    pieces: list[Piece] = []
    used: list[int] = []

    def reader(index: int, generation: EngineRequest) -> ChoiceReader:
        return ChoiceReader(index, generation, Letters())  # type: ignore[arg-type]

    try:
        async with aclosing(answer_pieces(generations, source, reader, place, LoopTurns())) as stream:
            async for piece in stream:
                pieces.append(piece)
                used.append(budget.used)
                if len(pieces) == stop_after:
                    break
    except GenerationFailed:
        pass
    return pieces, [*used, budget.used]


@pytest.mark.parametrize("choices", [1, 2, 4, 5, 23])
def test_as_many_choices_run_as_there_are_places(choices: int) -> None:
    """All are answered whole, never more at once than the place has units, and nothing is held afterwards."""
    source = Source()
    pieces, used = asyncio.run(run(choices, source))
    texts = {index: "".join(piece.text for piece in pieces if piece.index == index) for index in range(choices)}
    assert texts == dict.fromkeys(range(choices), "abc")
    assert source.most <= min(choices, PLACES // 2)
    assert choices < PLACES or used[-2] < PLACES // 2, "a pump without a choice left returns its unit at once"
    assert (used[-1], source.running, source.ended) == (0, 0, choices)


@pytest.mark.parametrize("choices", [1, 23])
def test_leaving_and_a_failing_choice_end_the_answer(choices: int) -> None:
    """Nothing still runs, no unit is taken and no choice begins; an answer is complete or absent."""
    source = Source()
    pieces, used = asyncio.run(run(choices, source, stop_after=1))
    assert len(pieces) == 1
    assert (used[-1], source.running) == (0, 0)
    assert source.ended <= PLACES // 2
    source = Source(failing=f"r.{choices - 1}")
    pieces, used = asyncio.run(run(choices, source))
    assert not any(piece.finish_reason for piece in pieces if piece.index == choices - 1)
    assert (used[-1], source.running) == (0, 0)


def read(
    tokenizer: PromptTokenizer, ids: list[int], sizes: list[int], stop: tuple[str, ...], sampling: SamplingParams
) -> tuple[str, int, list[ToldToken]]:
    """Read ids in chunks; return the text, the number of ids read, and their logprobs."""
    reader = ChoiceReader(0, structs.replace(generation(), sampling=sampling), tokenizer.decoder(), stop)
    text, read_ids, told, start = "", 0, [], 0
    for size in [*sizes, len(ids)]:
        chunk = tuple(ids[start : start + size])
        start += size
        logprobs = tuple(TokenLogprob(-float(token), ((token, -1.0),)) for token in chunk if sampling.logprobs)
        (piece,) = reader.read(output(chunk, None, "length" if start >= len(ids) else None, logprobs=logprobs))
        text, read_ids = text + piece.text, read_ids + piece.new_tokens
        told.extend(piece.logprobs)
        assert all(one.offset <= len(text) for one in piece.logprobs), "no token is reported before its text"
        if piece.finish_reason is not None:
            assert bool(piece.stop_sequence) == (piece.finish_reason == "stop")
            break
    return text, read_ids, told


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(3, 4095), min_size=1, max_size=25),
    sizes=st.lists(st.integers(1, 5), max_size=25),
    cut=st.integers(0, 40),
    min_tokens=st.integers(0, 8),
    data=st.data(),
)
def test_chunks_change_nothing(
    tokenizer: PromptTokenizer, ids: list[int], sizes: list[int], cut: int, min_tokens: int, data: Any
) -> None:
    """Offsets are the tokens' starts in the text; a stop string removes its tokens with it."""
    whole = tokenizer.decode(ids)
    stop = (whole[cut : cut + 2],) if data.draw(st.booleans()) and len(whole) >= cut + 2 else ()
    sampling = SamplingParams(99, logprobs=1, rules=TokenRules(min_tokens=min_tokens) if min_tokens else None)
    text, read_ids, told = read(tokenizer, ids, [], stop, sampling)
    assert read(tokenizer, ids, sizes, stop, sampling) == (text, read_ids, told)
    assert read_ids > min_tokens or read_ids == len(ids), "an earlier stop string does not count"
    silent = SamplingParams(99, rules=sampling.rules)
    assert read(tokenizer, ids, sizes, stop, silent) == (text, read_ids, [])
    decoder, offset, offsets = tokenizer.decoder(), 0, []
    for token in ids:
        offsets.append(offset)
        offset += len(decoder.push((token,)))
    if len(text) == len(whole):
        assert text == whole
    if read_ids == len(ids) and text == whole:
        assert [one.offset for one in told] == offsets
        assert b"".join(one.token.raw for one in told).decode(errors="replace") == whole
    else:
        assert whole.startswith(text)
        assert [one.offset for one in told] == [offset for offset in offsets[:read_ids] if offset < len(text)]
    assert [one.token.logprob for one in told] == [-float(token) for token in ids[: len(told)]]


@settings(max_examples=100, deadline=None)
@given(
    ids=st.lists(st.integers(3, 4095), min_size=1, max_size=25),
    sizes=st.lists(st.integers(1, 5), max_size=25),
    taken=st.lists(st.booleans(), min_size=1, max_size=25),
    cut=st.integers(0, 40),
)
def test_pieces_that_are_taken_at_once_are_the_same(
    tokenizer: PromptTokenizer, ids: list[int], sizes: list[int], taken: list[bool], cut: int
) -> None:
    """Even if they contain a stop string: then nothing more is taken, and the last piece is yielded."""
    whole = tokenizer.decode(ids)
    stop = (whole[cut : cut + 2],) if len(whole) >= cut + 2 else ()
    chunks = [tuple(ids[start:end]) for start, end in pairwise([0, *accumulate(sizes), len(ids)]) if ids[start:end]]

    class Told:
        async def generate(
            self, generation: EngineRequest, *, at_once: TakeAtOnce | None = None
        ) -> AsyncGenerator[EngineOutput, None]:
            for number, chunk in enumerate(chunks, 1):
                tokens = output(chunk, None, "length" if number == len(chunks) else None)
                if at_once is None or tokens.finish_reason is not None or not at_once(tokens):
                    yield tokens

    async def pieces(sink: PieceSink | None, seen: list[Piece]) -> list[Piece]:
        see, reader = seen.append, ChoiceReader(0, generation(), tokenizer.decoder(), stop)
        async with aclosing(choice_pieces(generation(), Told(), reader, sink)) as stream:
            async for piece in stream:
                see(piece)
        return seen

    sink, seen, opens = PieceSink(), list[Piece](), cycle(taken)
    sink.open, sink.write = lambda: next(opens), seen.append
    assert asyncio.run(pieces(sink, seen)) == asyncio.run(pieces(None, []))


def test_a_tokens_bytes_are_shown_in_every_vocabulary(tokenizer: PromptTokenizer) -> None:
    """Special tokens are shown by name, unknown ids as nothing."""
    decoder = tokenizer.decoder()
    assert decoder.shown_bytes(2) == b"<|im_end|>"
    assert decoder.shown_bytes(10**6) == b""


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 7), max_size=25),
    answer=st.lists(st.integers(3, 4095), max_size=6),
    echo=st.booleans(),
)
def test_a_prompts_tokens_go_before_the_answers_in_parts_of_any_size(
    tokenizer: PromptTokenizer, text: str, sizes: list[int], answer: list[int], echo: bool
) -> None:
    """All in the first piece; the offsets of an echo's tokens, and of the answer behind it, are places in the text."""
    prompt = tokenizer.encode(text, b"r" * 16).token_ids.tolist()
    wanted = structs.replace(generation(), sampling=SamplingParams(99, logprobs=1), echo=text if echo else "")
    told = PromptTokens(prompt, tokenizer.texts, echo_tops=1 if echo else None, tops=2, chars=len(wanted.echo))
    reader = ChoiceReader(0, wanted, tokenizer.decoder(), prompt=told)
    left = [TokenLogprob(-float(token), ((5, -1.0), (6, -2.0), (7, -3.0)), 4) for token in prompt[1:]]
    for size in [*sizes, len(left)]:
        part, left = tuple(left[:size]), left[size:]
        if part:
            assert reader.read(output((), prompt_logprobs=part)) == []
    logprobs = tuple(TokenLogprob(-0.5, ((token, -0.5),)) for token in answer)
    (piece,) = reader.read(output(tuple(answer), FirstToken(0), "length", logprobs=logprobs))
    assert piece.text == wanted.echo + tokenizer.decode(answer)
    assert piece.prompt is not None
    assert [place[0] for place in piece.prompt] == [
        (token, tokenizer.texts.shown_bytes(token), -float(token), 4) for token in prompt[1:]
    ]
    ranks = [[(one.token_id, one.rank) for one in place[1:]] for place in piece.prompt]
    assert ranks == [[pair for pair in ((5, 1), (6, 2)) if pair[0] != token] for token in prompt[1:]]
    echoed = piece.logprobs[: len(prompt)] if echo else ()
    assert len(piece.logprobs) == len(echoed) + len(answer)
    if echo:
        assert [one.token.logprob for one in echoed] == [None, *(-float(token) for token in prompt[1:])]
        assert [[other.logprob for other in one.top] for one in echoed[1:]] == [[-1.0]] * (len(prompt) - 1)
        raw = b"".join(one.token.raw for one in echoed)
        assert raw.decode() == text
        before = [b"".join(one.token.raw for one in echoed[:at]) for at in range(len(echoed))]
        assert [one.offset for one in echoed] == [len(start.decode(errors="ignore")) for start in before]
    assert all(one.offset >= len(wanted.echo) for one in piece.logprobs[len(echoed) :])


def test_tokens_may_be_named_by_their_ids(tokenizer: PromptTokenizer) -> None:
    """vLLM's form, for those of an answer, of an echo and the likeliest at each place; the text stays the same."""
    wanted = structs.replace(generation(), sampling=SamplingParams(99, logprobs=1), echo="Hi")
    prompt = tokenizer.encode("Hi", b"r" * 16).token_ids.tolist()
    told = PromptTokens(prompt, tokenizer.texts, echo_tops=1, tops=None, chars=2, by_id=True)
    reader = ChoiceReader(0, wanted, tokenizer.decoder(), prompt=told, by_id=True)
    answer = (11, 12)
    if len(prompt) > 1:
        reader.read(output((), prompt_logprobs=tuple(TokenLogprob(-0.5, ((5, -0.5),), 1) for _ in prompt[1:])))
    logprobs = tuple(TokenLogprob(-0.5, ((7, -0.1),)) for _ in answer)
    (piece,) = reader.read(output(answer, FirstToken(0), "length", logprobs=logprobs))
    assert piece.text == "Hi" + tokenizer.decode(answer)
    assert [one.token.raw for one in piece.logprobs] == [b"token_id:%d" % token for token in (*prompt, *answer)]
    tops = [[other.raw for other in one.top] for one in piece.logprobs[len(prompt) :]]
    assert tops == [[b"token_id:7"]] * 2
