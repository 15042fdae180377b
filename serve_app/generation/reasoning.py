"""Separate the reasoning that a model writes before its answer by the tags around it. Source of names: vLLM."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from serve_app.api.format import ApiFinishReason, CallEnded, ToldToken
from serve_app.generation.answer import Piece, SplitPiece
from serve_app.tokenization.detokenizer import held_back


class Tags(NamedTuple):
    """The tags around reasoning. ``assumed``: an answer begins inside reasoning unless its prompt has ended it."""

    start: str
    end: str
    assumed: bool = False

    def opened_by(self, prompt: str, continued: str = "") -> bool:
        """Return whether an answer begins inside reasoning. ``continued``: the text of the answer that it continues.

        A user's text opens none: the tag is the prompt's last word, or part of the continued answer.
        """
        if self.start in continued:
            return self.end not in continued.rpartition(self.start)[2]
        prompt = prompt.rstrip()
        return prompt.endswith(self.start) or (self.assumed and not continued and not prompt.endswith(self.end))


REASONING_TAGS = {
    "qwen3": Tags("<think>", "</think>"),
    "deepseek_r1": Tags("<think>", "</think>", assumed=True),
    "mistral": Tags("[THINK]", "[/THINK]"),
    "seed_oss": Tags("<seed:think>", "</seed:think>"),
    "granite": Tags("Here is my thought process:", "Here is my response:"),
}
"""By their names in the setting ``reasoning_parser``; if a template has two, the first counts."""


def find_reasoning_tags(template: str, special_tokens: frozenset[str]) -> str:
    """Return the name of the tags in a chat template or the special tokens, "none" if there are none."""
    names = (name for name, tags in REASONING_TAGS.items() if tags.end in template or tags.end in special_tokens)
    return next(names, "none")


def grammar_after(grammar: str, tags: Tags, special: Mapping[str, int], *, opened: bool) -> str:
    """Return a grammar, in llguidance's form, that applies only after the reasoning, or at once without any.

    ``special``: ids of tags that are no text in grammars.
    """
    start, end = (f"<[{special[tag]}]>" if tag in special else json.dumps(tag) for tag in (tags.start, tags.end))
    inside = f"inside: /(?s:.*)/ {end}" if tags.end in special else f"inside[suffix={end}]: /(?s:.*)/"
    begin = f"{start}? reasoning" if opened else f"(/\\s{{0,4}}/ {start} reasoning)?"
    return behind(f"start: {begin} @answer\nreasoning: inside /\\s{{0,4}}/\n{inside}", grammar)


def behind(lark: str, grammar: str) -> str:
    """Return the grammar, in llguidance's form, that ``lark`` describes; its ``@answer`` is ``grammar``."""
    named = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**named[0], "name": "answer"}, *named[1:]]})


class ReasoningReader:
    """Splits one choice, token by token, into its reasoning and the text after it, which ``rest`` then reads.

    White space around either is dropped. The tags count as reasoning tokens; logprobs cover only tokens after it.
    ``inside`` reads calls within the reasoning: the first one ends it, and ``inside`` reads what follows.
    """

    def __init__(
        self, tags: Tags, *, opened: bool, rest: SplitPiece | None = None, inside: SplitPiece | None = None
    ) -> None:
        self._tags = tags
        self._opened = opened
        self._rest = rest
        self._inside = inside
        self._stage = "before"
        self._buffer = self._space = ""
        self._thought = ""
        self._began = self._has_text = self._closed = self._spaces = False
        self._tokens = 0
        self._logprobs: tuple[ToldToken, ...] = ()
        self.called = False

    @property
    def by_token(self) -> bool:
        """Whether reasoning may continue, or calls are read token by token."""
        if self.called:
            return self._inside is not None and self._inside.by_token
        return self._stage != "over" or (self._rest is not None and self._rest.by_token)

    @property
    def undecided(self) -> bool:
        """Whether it is not known yet if the answer begins with reasoning."""
        return self._stage == "before"

    def split(self, piece: Piece) -> list[Piece]:
        """Split a piece into one or several; in each the reasoning comes first."""
        if self.called and self._inside is not None:
            return self._after_call(self._inside.split(piece))
        thinking = self._stage in ("before", "inside")
        if self._stage != "over":
            piece = self._split(piece)
        if thinking and self._began and self._inside is not None:
            calls = self._calls_within(piece, self._inside)
            if calls is not None:
                return calls
            piece = replace(piece, reasoning=self._thought)
        return [piece] if self._rest is None or self._stage != "over" else self._rest.split(piece)

    def _calls_within(self, piece: Piece, inside: SplitPiece) -> list[Piece] | None:
        """Look for calls in a piece's reasoning; return None without any, and set what is left of the reasoning."""
        ended = self._stage != "inside"
        reason: ApiFinishReason | None = (piece.finish_reason or "stop") if ended else None
        read = inside.split(replace(piece, text=piece.reasoning, reasoning="", logprobs=(), finish_reason=reason))
        at = next((at for at, part in enumerate(read) if part.calls), len(read))
        thought = self._space + "".join(part.text for part in read[: at + 1])
        self._thought = thought.rstrip()
        self._space = thought[len(self._thought) :]
        if at == len(read):
            return None
        first = replace(
            read[0], text="", reasoning=self._thought, reasoning_tokens=piece.reasoning_tokens, calls=read[at].calls,
            finish_reason=read[at].finish_reason,
        )  # fmt: skip
        found = [first, *read[at + 1 :]]
        self.called = True
        buffer, self._buffer = self._buffer, ""
        if ended and (piece.text or piece.finish_reason is None):
            # The tag ended reasoning whose last words were a call: others may follow behind it.
            found = [replace(part, finish_reason=None) for part in found]
            self._inside, self._closed = self._rest, True
            behind = Piece(piece.index, piece.text, finish_reason=piece.finish_reason)
            found += self._rest.split(behind) if self._rest is not None and piece.text else []
        elif buffer:
            found += inside.split(Piece(piece.index, buffer))
        return self._after_call(found)

    def _after_call(self, pieces: list[Piece]) -> list[Piece]:
        """Drop the end tag, and the white space behind it, from the text behind a call in the reasoning."""
        after: list[Piece] = []
        for piece in pieces:
            text, self._buffer = self._buffer + piece.text, ""
            if not self._closed:
                before, found, text = text.partition(self._tags.end)
                self._closed = bool(found)
                keep = (
                    0 if found or piece.calls or piece.finish_reason is not None else held_back(before, self._tags.end)
                )
                before, self._buffer = before[: len(before) - keep], before[len(before) - keep :]
                self._spaces = bool(found)
                text = before + text.lstrip()
            elif self._spaces:
                text = text.lstrip()
            self._spaces = self._spaces and not text
            cut = any(isinstance(event, CallEnded) and event.cut for event in piece.calls)
            ends = piece.finish_reason == "stop" and not cut
            reason: ApiFinishReason | None = "tool_calls" if ends else piece.finish_reason
            after.append(replace(piece, text=text, finish_reason=reason))
        return after

    def _split(self, piece: Piece) -> Piece:
        self._tokens += piece.new_tokens if self._stage in ("before", "inside") else 0
        self._logprobs += piece.logprobs
        reasoning, text = self.push(piece.text, ended=piece.finish_reason is not None)
        if self._stage == "before":
            return replace(piece, text="", logprobs=())
        tokens = self._tokens if self._began else 0
        logprobs = self._logprobs if not self._began else piece.logprobs if self._stage == "over" else ()
        self._tokens, self._logprobs = 0, ()
        return replace(piece, text=text, reasoning=reasoning, reasoning_tokens=tokens, logprobs=logprobs)

    def push(self, text: str, *, ended: bool = False) -> tuple[str, str]:
        """Return (more of the reasoning, more of the text behind it). The beginning of a tag is held back."""
        start, end = self._tags.start, self._tags.end
        self._buffer += text
        reasoning = ""
        if self._stage == "before":
            begin = self._buffer.lstrip()
            if begin.startswith(start):
                self._buffer = begin[len(start) :]
            elif start.startswith(begin) and not ended:
                return "", ""
            self._began = self._opened or begin.startswith(start)
            self._stage = "inside" if self._began else "over"
        if self._stage == "inside":
            inside, closed, behind = (self._buffer if self._has_text else self._buffer.lstrip()).partition(end)
            reasoning = inside if closed or ended else inside[: len(inside) - held_back(inside, end)]
            reasoning = reasoning.rstrip()
            self._has_text = self._has_text or bool(reasoning)
            self._buffer = behind if closed or ended else inside[len(reasoning) :]
            self._stage = "behind" if closed or ended else "inside"
        if self._stage == "behind":
            self._buffer = self._buffer.lstrip()
            self._stage = "over" if self._buffer or ended else "behind"
        content = self._buffer if self._stage == "over" else ""
        self._buffer = "" if self._stage == "over" else self._buffer
        return reasoning, content


class ContentGate:
    """Tells the text of reasoning, which stop strings do not end, from the content behind it.

    ``reader``: the choice's own, which a call may end.
    """

    def __init__(self, tags: Tags, *, opened: bool, reader: ReasoningReader) -> None:
        self._own = ReasoningReader(tags, opened=opened)
        self._reader = reader
        self._buffer = ""

    def __call__(self, text: str, token_ids: Sequence[int], *, ended: bool = False) -> tuple[str, str]:
        """Return (text before the content, more of the content). Text is held back while it may begin a tag."""
        if self._reader.called:
            text, self._buffer = self._buffer + text, ""
            return "", text
        self._buffer += text
        _, content = self._own.push(text, ended=ended)
        if self._own.undecided:
            return "", ""
        buffer, self._buffer = self._buffer, ""
        return buffer[: len(buffer) - len(content)], content
