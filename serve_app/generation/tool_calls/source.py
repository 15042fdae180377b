"""Text that arrives in pieces, read as if it were complete; and calls in it as JSON objects.

A grammar is a generator over a ``Source``: it yields the parts that it has read, and None when it needs more text. JSON
is tracked only by its strings and brackets: the users of arguments find out whether they are valid.
"""

import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

import msgspec

from serve_app.api.format import CallArguments, CallBegun, CallEnded, CallEvent
from serve_app.tokenization.detokenizer import held_back

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_AFTER_WORD = re.compile(r"[\s,:{}\[\]\"]")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = {"name", "id", "type", *_ARGUMENTS}
_decode_string = msgspec.json.Decoder(str).decode

MakeId = Callable[[str], str]
"""Returns the id of a new call by its name."""

T = TypeVar("T")
Steps = Generator[str | CallEvent | None, None, T]
"""Steps of a grammar: text to show, events of calls, or None to request more text; then a result."""


class Source:
    """The text from the current position on. ``ended``: no more text follows; ``cut``: the model had not finished."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.ended = False
        self.cut = False
        self._taken: list[str] = []

    @property
    def cut_here(self) -> bool:
        """Whether the text was cut, and is read to its end."""
        return self.cut and self.ended and self.position >= len(self.text)

    def call_ended(self, raw: str | None = None) -> CallEnded:
        """Return the end of the call that was read since the mark. ``raw``: its text, None: ``self.raw``."""
        return CallEnded(self.raw if raw is None else raw, cut=self.cut_here)

    def push(self, text: str) -> None:
        """Add text; text already read is dropped."""
        self.text = self.text[self.position :] + text
        self.position = 0

    def take(self, chars: int) -> str:
        """Read and return this many characters, which must exist."""
        taken = self.text[self.position : self.position + chars]
        self.position += chars
        self._taken.append(taken)
        return taken

    def mark(self, before: str = "") -> None:
        """Start ``raw`` here, with ``before``."""
        self._taken = [before]

    @property
    def raw(self) -> str:
        """All text read since the mark."""
        return "".join(self._taken)

    def peek(self) -> Steps[str]:
        """Return the next character, "" at the end."""
        while self.position >= len(self.text) and not self.ended:
            yield None
        return self.text[self.position : self.position + 1]

    def accept(self, word: str) -> Steps[bool]:
        """Read a word if it is next; return whether it was. What a cut left of it is read, too."""
        while not self.text.startswith(word, self.position):
            if not word.startswith(rest := self.text[self.position :]):
                return False
            if self.ended:
                self.take(len(rest) if self.cut else 0)
                return False
            yield None
        self.take(len(word))
        return True

    def spaces(self) -> Steps[str]:
        """Read white space; return the next character, "" at the end."""
        while (char := (yield from self.peek())).isspace():
            self.take(1)
        return char

    def until(self, *words: str, marks: bool = False) -> Generator[str | None, None, str]:
        """Read up to the first of some words, and past it; yield the text before it as it arrives, or None.

        Return the word, "" at the end of the text. The possible beginning of a word is held back; ``marks``: for good,
        if the text was cut there.
        """
        while True:
            places = [(at, word) for word in words if (at := self.text.find(word, self.position)) >= 0]
            at, word = min(places, default=(len(self.text), ""))
            if not word and (not self.ended or (marks and self.cut)):
                at -= max(held_back(self.text[self.position :], word) for word in words)
            if at > self.position:
                yield self.take(at - self.position)
            if word or self.ended:
                self.take(len(word) if word else len(self.text) - self.position)
                return word
            yield None

    def text_before(self, *words: str) -> Steps[str]:
        """Yield the text before the first of some words, and read both. Return the word, "" without any."""
        steps = self.until(*words)
        while True:
            try:
                text = next(steps)
            except StopIteration as end:
                self.mark(end.value)
                return str(end.value)
            self.mark()  # text that is shown need not be kept
            yield text

    def next_is(self, *words: str) -> Steps[bool]:
        """Return whether one of some words follows, or nothing, apart from white space. Reads only what a cut left."""
        while True:
            rest = self.text[self.position :].lstrip()
            if any(map(rest.startswith, words)) or (self.ended and not rest):
                return True
            begun = any(word.startswith(rest) for word in words)
            if self.ended and self.cut and begun:
                self.take(len(self.text) - self.position)
                return True
            if self.ended or (rest and not begun):
                return False
            yield None


def json_call(source: Source, make_id: MakeId, names: Collection[str] | None = None) -> Steps[bool | None]:
    """Read one call; return whether one has begun. If not, none of the text read was shown. None: the text was cut.

    A call begins once its name and the opening of its arguments are known, in any order, or the name alone if the text
    was cut behind it. ``names``: the allowed ones, None for any. Missing arguments are ``{}``. An object with another
    key before both is not a call.
    """
    begun = False
    name: str | None = None
    arguments = ""
    expected: Collection[str] | None = None  # what the last string had to be, if the text was cut within it
    raw = ""
    opened = yield from source.accept("{")
    while opened:
        yield from source.spaces()
        key, raw = yield from _string(source)
        expected = _KEYS
        if key is None or (yield from source.spaces()) != ":":
            break
        source.take(1)
        opening = yield from source.spaces()
        if key == "name" and name is None:
            name, raw = yield from _string(source)
            expected = names
            if name is None:
                break
            if names is not None and name not in names:
                return begun
        elif key in _ARGUMENTS and not begun and not arguments and opening != "n":
            if opening != "{":
                break
            if name is None:
                arguments = yield from _whole(_value(source))
            else:
                begun = True
                yield CallBegun(make_id(name), name)
                yield from stream_arguments(source)
        elif begun or key in _KEYS:
            yield from _whole(_value(source))
        else:
            return False
        if name is not None and arguments and not begun:
            begun = True
            yield from (CallBegun(make_id(name), name), CallArguments(arguments))
        after = yield from source.spaces()
        if after == "}" and name is not None:
            source.take(1)
            if not begun:
                yield from (CallBegun(make_id(name), name), CallArguments("{}"))
            return True
        if after != ",":
            break
        source.take(1)
    if begun or not source.cut_here:
        return begun
    if name is not None:
        yield CallBegun(make_id(name), name)
        return True
    return None if expected is None or any(word.startswith(raw.strip('"')) for word in expected) else False


def stream_arguments(source: Source) -> Steps[None]:
    """Read a JSON object or list; yield it as arguments, piece by piece."""
    for piece in _value(source):
        yield None if piece is None else CallArguments(piece)


def _string(source: Source) -> Steps[tuple[str | None, str]]:
    """Read a string and return its value and its text; None if it is missing or invalid."""
    if (yield from source.peek()) != '"':
        return None, ""
    raw = yield from _whole(_value(source))
    try:
        return _decode_string(raw), raw
    except msgspec.DecodeError:
        return None, raw


def _whole(pieces: Generator[str | None, None, None]) -> Steps[str]:
    """Read a value and return its complete text."""
    parts: list[str] = []
    for piece in pieces:
        if piece is None:
            yield None
        else:
            parts.append(piece)
    return "".join(parts)


def _value(source: Source) -> Generator[str | None, None, None]:
    """Read the next JSON value; yield its text as it arrives, and None when more is needed."""
    opening = source.text[source.position : source.position + 1]
    return _nested(source) if opening in ('"', "{", "[") else _word(source)


def _nested(source: Source) -> Generator[str | None, None, None]:
    """Read a string, an object or a list."""
    depth = 0
    in_string = escaped = False
    while True:
        text, start = source.text, source.position
        at, closed = start, False
        if escaped and at < len(text):
            at, escaped = at + 1, False
        while not closed and (match := (_INSIDE if in_string else _OUTSIDE).search(text, at)):
            at = match.end()
            if match.group() == "\\":
                escaped = at == len(text)
                at += not escaped
                continue
            if match.group() == '"':
                in_string = not in_string
            else:
                depth += 1 if match.group() in "{[" else -1
            closed = depth == 0 and not in_string
        if not closed:
            at = len(text)
        if at > start:
            yield source.take(at - start)
        if closed or source.ended:
            return
        yield None


def _word(source: Source) -> Generator[str | None, None, None]:
    """Read a number, one of JSON's words, or invalid text, up to a character that cannot be part of one."""
    while True:
        match = _AFTER_WORD.search(source.text, source.position)
        end = match.start() if match else len(source.text)
        if end > source.position:
            yield source.take(end - source.position)
        if match or source.ended:
            return
        yield None
