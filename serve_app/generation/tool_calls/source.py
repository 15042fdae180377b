"""Text that arrives in pieces, read as if all of it were there.

A grammar is a generator over a ``Source``: it yields what it has read, and None where it needs more text. So nothing
it yields depends on where the text was cut.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from serve_app.api.tool_calls import CallEvent

T = TypeVar("T")
Steps = Generator[str | CallEvent | None, None, T]
"""Steps of a grammar: text to show, events of calls, or None for "more text, please"; then a result."""


class Source:
    """The text from the place that is read next. ``ended``: no more comes."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.ended = False
        self._taken: list[str] = []

    def push(self, text: str) -> None:
        """Add text; what was read is forgotten."""
        self.text = self.text[self.position :] + text
        self.position = 0

    def take(self, chars: int) -> str:
        """Read so many characters, which are there."""
        taken = self.text[self.position : self.position + chars]
        self.position += chars
        self._taken.append(taken)
        return taken

    def mark(self, before: str = "") -> None:
        """Let ``raw`` begin here, with ``before``."""
        self._taken = [before]

    @property
    def raw(self) -> str:
        """All that was read since the mark."""
        return "".join(self._taken)

    def peek(self) -> Steps[str]:
        """Return the next character, "" at the end."""
        while self.position >= len(self.text) and not self.ended:
            yield None
        return self.text[self.position : self.position + 1]

    def accept(self, word: str) -> Steps[bool]:
        """Read a word if it is what comes next."""
        while not self.text.startswith(word, self.position):
            if self.ended or not word.startswith(self.text[self.position :]):
                return False
            yield None
        self.take(len(word))
        return True

    def spaces(self) -> Steps[str]:
        """Read white space; return what comes next, "" at the end."""
        while (char := (yield from self.peek())).isspace():
            self.take(1)
        return char

    def text_before(self, word: str) -> Steps[bool]:
        """Yield the text before a word, and read both; False if it does not come.

        What may be the beginning of the word is held back.
        """
        while True:
            at = self.text.find(word, self.position)
            end = at if at >= 0 else len(self.text) - (0 if self.ended else self._held(word))
            if end > self.position:
                yield self.text[self.position : end]
            self.position = end
            if at >= 0:
                self.position += len(word)
                return True
            if self.ended:
                return False
            yield None

    def _held(self, word: str) -> int:
        rest = self.text[self.position :]
        lengths = range(min(len(rest), len(word) - 1), 0, -1)
        return next((length for length in lengths if rest.endswith(word[:length])), 0)
