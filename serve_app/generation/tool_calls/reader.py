"""An answer's text becomes text to show and events of tool calls, while it comes."""

from __future__ import annotations

from serve_app.api.tool_calls import CallBegun, CallEvent
from serve_app.generation.tool_calls.formats import Grammar
from serve_app.generation.tool_calls.json_call import MakeId
from serve_app.generation.tool_calls.source import Source


class CallReader:
    """Reads the tool calls of one answer. ``calls``: how many have begun.

    However the text is cut, texts and arguments concatenate to the same. White space before the first call is no
    text: it is shown once text follows, or where no call came at all.
    """

    def __init__(self, grammar: Grammar, make_id: MakeId, names: frozenset[str]) -> None:
        self._source = Source()
        self._steps = grammar(self._source, make_id, names)
        self._spaces = ""
        self._shown = False
        self.calls = 0

    def push(self, text: str) -> list[str | CallEvent]:
        """Return what text completes: texts to show and events, in order. The beginning of a call is held back."""
        self._source.push(text)
        return self._read()

    def flush(self) -> list[str | CallEvent]:
        """Return what was held back; the answer has ended."""
        self._source.ended = True
        found = self._read()
        if self._spaces and not self.calls:
            found.append(self._spaces)
            self._spaces = ""
        return found

    def _read(self) -> list[str | CallEvent]:
        found: list[str | CallEvent] = []
        for step in self._steps:
            if step is None:
                break
            if isinstance(step, str):
                found += self._text(step)
                continue
            if isinstance(step, CallBegun):
                self.calls += 1
                self._shown = True
            found.append(step)
        return found

    def _text(self, text: str) -> list[str | CallEvent]:
        if not self._shown:
            text = self._spaces + text
            self._shown = not (text == "" or text.isspace())
            self._spaces = "" if self._shown else text
        return [text] if self._shown and text else []
