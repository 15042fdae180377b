"""From generated tokens to the text of an answer, piece by piece; all its choices are merged into one stream."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Container, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec.structs import replace

from serve_app.api.format import (
    ApiFinishReason,
    CallEnded,
    CallEvent,
    RankedPrompt,
    RankedToken,
    ShownToken,
    TokenIds,
    ToldToken,
)
from serve_app.api.request import GenerateRequest
from serve_app.engine.protocol import EngineOutput, EngineRequest, FirstToken, TakeAtOnce, TokenLogprob
from serve_app.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    InvalidRequest,
    LimitReason,
    RateLimited,
    WarmpathError,
)
from serve_app.fairness.queue import LoopTurns, Place
from serve_app.tokenization.detokenizer import Detokenizer, StopChecker, TokenTexts


class TokenSource(Protocol):
    """Source of generated tokens."""

    def generate(
        self, generation: EngineRequest, avoid: tuple[str, ...] = (), *, at_once: TakeAtOnce | None = None
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield a request's outputs as they arrive, except those in the middle that ``at_once`` takes.

        ``avoid``: replicas to use only if no other can take it. The last output has a finish reason. Raises a
        ``WarmpathError``, or the error of ``at_once``.
        """


def told_ids(request: GenerateRequest, generations: Sequence[EngineRequest]) -> TokenIds | None:
    """Return the token ids that an answer reports, with those of the prompts, None if they are not requested."""
    return TokenIds([made.token_ids.tolist() for made in generations]) if request.return_token_ids else None


def queue_full(retry_after_s: float, reason: LimitReason | None = None) -> RateLimited:
    """Return the error for full queues at every replica. ``reason``: the last one's, None: the router's."""
    return RateLimited(
        "Every replica's queue is full; send the request again later.",
        retry_after_s=retry_after_s,
        reason=reason or LimitReason("router", "max_waiting_requests"),
    )


def raise_for(output: EngineOutput, grammar_field: str) -> None:
    """Raise the client's error for an output with an error. ``grammar_field``: the request's that has its grammar."""
    error: WarmpathError
    match output.error:
        case "":
            return
        case "too_long":
            error = ContextLengthExceeded(output.message, param="messages")
        case "queue_full":
            error = queue_full(output.retry_after_s, output.reason)
        case "invalid":
            error = InvalidRequest(output.message)
        case "grammar":
            error = InvalidRequest(f"{grammar_field} cannot be followed: {output.message}.", param=grammar_field)
        case "timeout":
            error = GenerationFailed(output.message, code="timeout")
        case _:
            error = GenerationFailed(output.message or "The engine failed this request.")
    raise error


class Piece(msgspec.Struct, frozen=True):
    """Text that one choice gained (maybe none), and then ``calls``. ``first``: only in its first piece.

    ``reasoning``: more of the reasoning, which precedes the text; ``reasoning_tokens``: how many new tokens it has.
    ``logprobs``: of the tokens that begin within the text, if requested. ``stop_sequence``: in the last piece, the stop
    string that ended the choice. ``token_ids``: of the piece before it was split. ``prompt``: the prompt's tokens, in
    the first piece if requested; those of an echo are in ``logprobs``.
    """

    index: int
    text: str
    new_tokens: int = 0
    first: FirstToken | None = None
    finish_reason: ApiFinishReason | None = None
    calls: tuple[CallEvent, ...] = ()
    logprobs: tuple[ToldToken, ...] = ()
    stop_sequence: str = ""
    reasoning: str = ""
    reasoning_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    prompt: RankedPrompt | None = None


class Gate(Protocol):
    """Tells text that stop strings do not end, such as reasoning, from the content behind it."""

    def __call__(self, text: str, token_ids: Sequence[int], *, ended: bool = False) -> tuple[str, str]:
        """Return (text before the content, more of the content) of a token's text."""


class SplitPiece(Protocol):
    """Reads reasoning and tool calls out of pieces."""

    @property
    def by_token(self) -> bool:
        """Whether each next piece must hold a single token."""

    def split(self, piece: Piece) -> list[Piece]:
        """Split a piece into one or several; the last may end the choice."""


def in_pieces(piece: Piece, events: list[str | CallEvent], *, called: bool, parallel: bool) -> list[Piece]:
    """Replace a piece's text by ``events``, and return it as one or several pieces; in each the text comes first.

    ``called``: the choice has begun a call. Without ``parallel`` it ends with its first call, unless that was cut.
    """
    reason: ApiFinishReason | None = piece.finish_reason
    cut = any(isinstance(event, CallEnded) and event.cut for event in events)
    if not parallel and not cut:
        end = next((i for i, event in enumerate(events, 1) if isinstance(event, CallEnded)), None)
        if end is not None:
            events, reason = events[:end], "stop"
    if reason == "stop" and called and not cut:
        reason = "tool_calls"
    (text, calls), *more = _in_order(events)
    pieces = [replace(piece, text=text, calls=calls, finish_reason=None, stop_sequence="")]
    pieces += (Piece(piece.index, text, calls=calls) for text, calls in more)
    pieces[-1] = replace(pieces[-1], finish_reason=reason, stop_sequence=piece.stop_sequence)
    return pieces


def _in_order(events: list[str | CallEvent]) -> Iterator[tuple[str, tuple[CallEvent, ...]]]:
    """Yield texts with the calls that follow each; at least once."""
    text = ""
    calls: list[CallEvent] = []
    for event in events:
        if not isinstance(event, str):
            calls.append(event)
        elif calls:
            yield text, tuple(calls)
            text, calls = event, []
        else:
            text += event
    yield text, tuple(calls)


def by_its_id(token_id: int) -> bytes:
    """Return vLLM's name of a token whose text does not matter."""
    return b"token_id:%d" % token_id


class PromptTokens:
    """Collects what an answer reports about its prompt's tokens, while their log-probabilities arrive.

    ``echo_tops``: the number of likeliest tokens beside each in an echo; ``tops``: in the list of ranked ones; None:
    there is no such echo or list. The echo's text has ``chars`` characters.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        texts: TokenTexts,
        *,
        echo_tops: int | None,
        tops: int | None,
        chars: int,
        by_id: bool = False,
    ) -> None:
        self._token_ids = token_ids
        self._raw = texts.shown_bytes
        self._echo_raw = by_its_id if by_id else self._raw
        self._decoder = Detokenizer(texts, texts.special(texts.special_tokens))
        self._chars = 0
        self._echo_chars = chars
        self._echo: list[ToldToken] = []
        self._echo_tops = echo_tops
        self._tops = tops
        self._ranked: list[tuple[RankedToken, ...]] = []
        self._read = 0
        self._next(None, ())

    def add(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Add the log-probabilities of the prompt's next tokens."""
        for one in logprobs:
            token_id = self._token_ids[self._read]
            if self._tops is not None:
                best = enumerate(one.top[: self._tops], 1)
                others = (RankedToken(i, self._raw(i), value, rank) for rank, (i, value) in best if i != token_id)
                self._ranked.append((RankedToken(token_id, self._raw(token_id), one.logprob, one.rank), *others))
            self._next(one.logprob, one.top)

    @property
    def ranked(self) -> RankedPrompt | None:
        """The list of ranked tokens so far, None if it was not requested."""
        return None if self._tops is None else tuple(self._ranked)

    @property
    def echo(self) -> list[ToldToken]:
        """The echo's tokens so far, by their places in its text, which lacks special tokens added to the prompt."""
        added = self._chars + len(self._decoder.flush()) - self._echo_chars
        return [one._replace(offset=max(0, one.offset - added)) for one in self._echo]

    def _next(self, logprob: float | None, top: Sequence[tuple[int, float]]) -> None:
        token_id = self._token_ids[self._read]
        self._read += 1
        if self._echo_tops is not None:
            others = tuple(ShownToken(self._echo_raw(other), value) for other, value in top[: self._echo_tops])
            self._echo.append(ToldToken(ShownToken(self._echo_raw(token_id), logprob), others, self._chars))
            self._chars += len(self._decoder.push((token_id,)))


class ChoiceReader:
    """Turns tokens of one choice into pieces, the last with a finish reason; logprobs go with their token's text.

    ``stop`` strings end it; with ``include_stop`` they are its last part. ``split``: None if it is only text.
    ``prompt``: None if nothing about the prompt's tokens is reported. ``by_id``: log-probabilities name tokens by ids.
    ``gate``: None if stop strings end any text. ``hidden_ends``: of these tokens at the end, only the ids are told.
    """

    def __init__(
        self,
        index: int,
        generation: EngineRequest,
        decoder: Detokenizer,
        stop: tuple[str, ...] = (),
        split: SplitPiece | None = None,
        *,
        include_stop: bool = False,
        prompt: PromptTokens | None = None,
        by_id: bool = False,
        gate: Gate | None = None,
        hidden_ends: Container[int] = (),
    ) -> None:
        sampling = generation.sampling
        self._hidden_ends = hidden_ends
        self._by_id = by_id
        self._index = index
        self._before = generation.echo
        self._decoder = decoder
        self._checker = StopChecker(stop, include=include_stop) if stop else None
        self._split = split
        self._min_tokens = sampling.rules.min_tokens if sampling.rules is not None else 0
        # Stop strings are searched token by token: the number of tokens per chunk depends on timing, but usage must
        # not. With logprobs, characters are counted per token too.
        self._one_by_one = bool(stop) or sampling.logprobs is not None
        self._prompt = prompt
        self._gate = gate if stop else None
        self._read = 0
        self._decoded_chars = self._released_chars = len(self._before)
        self._waiting: deque[ToldToken] = deque()

    def read(self, tokens: EngineOutput) -> list[Piece]:
        """Return the pieces that these tokens complete. Raises GenerationFailed if the generation broke off."""
        if tokens.prompt_logprobs and self._prompt is not None:
            self._prompt.add(tokens.prompt_logprobs)
            if tokens.first is None and tokens.finish_reason is None:
                return []
        if len(tokens.token_ids) > 1 and self._split is not None and self._split.by_token:
            return self._read_apart(tokens)
        end: tuple[int, ...] = ()
        if tokens.finish_reason == "stop" and tokens.token_ids and tokens.token_ids[-1] in self._hidden_ends:
            *kept, last = tokens.token_ids
            end, tokens = (last,), replace(tokens, token_ids=tuple(kept), logprobs=tokens.logprobs[: len(kept)])
        # A token may complete several characters or none, so text is counted apart from tokens from here on.
        if self._one_by_one:
            text, taken, stopped = self._read_one_by_one(tokens)
        else:
            text, taken, stopped = self._decoder.push(tokens.token_ids), len(tokens.token_ids), False
        reason: ApiFinishReason | None = None
        if not stopped and tokens.finish_reason is not None:
            if tokens.finish_reason not in ("stop", "length"):
                raise GenerationFailed("The generation was broken off; send the request again.")
            reason = tokens.finish_reason
            rest = self._decoder.flush()
            if self._checker is not None:
                rest, stopped = self._checked(self._checker, rest, (), ended=True)
                rest += "" if stopped else self._checker.flush()
            text += rest
        if stopped:
            reason = "stop"
        self._released_chars += len(text)
        # Text may be held back, as the beginning of a stop string or half a character; a token's log-probability waits
        # for its text, and is never shown for text that a stop string removed.
        ready = []
        while self._waiting and (
            self._waiting[0].offset < self._released_chars or (reason is not None and not stopped)
        ):
            ready.append(self._waiting.popleft())
        echo: Piece | None = None
        if self._before and self._split is not None:  # nobody reads reasoning or calls in it
            echo, self._before = Piece(self._index, self._before, first=tokens.first), ""
        if self._before:
            text, self._before = self._before + text, ""
        prompt: RankedPrompt | None = None
        if self._prompt is not None:
            ready, prompt, self._prompt = [*self._prompt.echo, *ready], self._prompt.ranked, None
        piece = Piece(
            self._index, text, taken, tokens.first, reason,
            logprobs=tuple(ready), stop_sequence=self._checker.found if self._checker is not None else "",
            token_ids=tokens.token_ids[:taken], prompt=prompt,
        )  # fmt: skip
        if self._split is None:
            pieces = [piece]
        elif echo is None:
            pieces = self._split.split(piece)
        else:
            pieces = [echo, *self._split.split(replace(piece, first=None))]
        if end and not stopped:  # after the split: no reader expects it
            pieces[-1] = replace(pieces[-1], token_ids=pieces[-1].token_ids + end)
        return pieces

    def _read_apart(self, tokens: EngineOutput) -> list[Piece]:
        """Read tokens one by one, as if each had arrived alone."""
        pieces: list[Piece] = []
        for at, token_id in enumerate(tokens.token_ids, 1):
            last, first = at == len(tokens.token_ids), tokens.first if at == 1 else None
            reason, logprobs = tokens.finish_reason if last else None, tokens.logprobs[at - 1 : at]
            alone = EngineOutput(tokens.request_id, (token_id,), logprobs, first=first, finish_reason=reason)
            pieces += self.read(alone)
            if pieces[-1].finish_reason is not None:
                break
        return pieces

    def _read_one_by_one(self, tokens: EngineOutput) -> tuple[str, int, bool]:
        """Return (text that is safe to show, number of tokens read for it, whether a stop string was found)."""
        released = ""
        for taken, token_id in enumerate(tokens.token_ids, 1):
            if tokens.logprobs:
                self._waiting.append(self._ranked_token(token_id, tokens.logprobs[taken - 1]))
            self._read += 1
            decoded = self._decoder.push((token_id,))
            self._decoded_chars += len(decoded)
            if self._checker is None:
                released += decoded
                continue
            text, stopped = self._checked(self._checker, decoded, (token_id,), early=self._read <= self._min_tokens)
            released += text
            if stopped:
                return released, taken, True
        return released, len(tokens.token_ids), False

    def _checked(
        self, checker: StopChecker, text: str, token_ids: Sequence[int], *, early: bool = False, ended: bool = False
    ) -> tuple[str, bool]:
        """Return (text that is safe to show, whether a stop string was found)."""
        if self._gate is None:
            return checker.push(text, early=early)
        before, content = self._gate(text, token_ids, ended=ended)
        released, stopped = checker.push(content, early=early)
        return before + released, stopped

    def _ranked_token(self, token_id: int, logprob: TokenLogprob) -> ToldToken:
        raw = by_its_id if self._by_id else self._decoder.shown_bytes
        top = tuple(ShownToken(raw(other), value) for other, value in logprob.top)
        return ToldToken(ShownToken(raw(token_id), logprob.logprob), top, self._decoded_chars)


def _closed() -> bool:
    return False


def _dropped(_: Piece) -> None:
    """Write nothing: the sink is never open."""


@dataclass(slots=True)
class PieceSink:
    """Accepts pieces of a single-choice answer directly, bypassing its generator, while ``open`` returns True."""

    open: Callable[[], bool] = _closed
    write: Callable[[Piece], None] = _dropped


async def choice_pieces(
    generation: EngineRequest, source: TokenSource, reader: ChoiceReader, sink: PieceSink | None = None
) -> AsyncGenerator[Piece, None]:
    """Yield one choice's pieces, except those that ``sink`` accepted; closing it cancels the generation."""
    ended: list[Piece] = []

    def at_once(tokens: EngineOutput) -> bool:
        if sink is None or not sink.open():
            return False
        for piece in reader.read(tokens):
            if piece.finish_reason is not None:
                ended.append(piece)  # the last one ends the stream, and takes the long way
                return False
            sink.write(piece)
        return True

    async with aclosing(source.generate(generation, at_once=at_once)) as stream:
        async for tokens in stream:
            for piece in ended or reader.read(tokens):
                yield piece
                if piece.finish_reason is not None:
                    return


async def answer_pieces(
    generations: list[EngineRequest],
    source: TokenSource,
    make_reader: Callable[[int, EngineRequest], ChoiceReader],
    place: Place,
    turns: LoopTurns,
    sink: PieceSink | None = None,
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of all choices as they arrive; ``place`` has a unit per concurrent one. A failure ends all.

    Each begins at its tenant's turn. Pieces of a single choice may go to ``sink`` instead.
    """
    try:
        if len(generations) == 1:
            await turns.turn(place.tenant)
            (generation,) = generations
            async with aclosing(choice_pieces(generation, source, make_reader(0, generation), sink)) as stream:
                async for piece in stream:
                    yield piece
            return
        streams = (
            choice_pieces(generation, source, make_reader(index, generation))
            for index, generation in enumerate(generations)
        )
        ready: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

        async def pump() -> None:
            try:
                for stream in streams:
                    await turns.turn(place.tenant)
                    async with aclosing(stream):
                        async for piece in stream:
                            ready.put_nowait(piece)
                place.give_back(1)
                ready.put_nowait(None)
            except Exception as error:  # the consumer raises it
                ready.put_nowait(error)

        at_work = min(place.units, len(generations))
        pumps = [asyncio.create_task(pump()) for _ in range(at_work)]
        try:
            while at_work:
                item = await ready.get()
                if item is None:
                    at_work -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
    finally:
        place.give_back()
