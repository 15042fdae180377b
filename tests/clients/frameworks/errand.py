"""The errand of every program: two tools, the request, the form of a structured answer."""

import json
import sys
from typing import Any

URL, MODEL, ASKED = sys.argv[1:4]
QUESTION = "Which city is it, and is it done?"
CITIES = ("Oslo", "Bergen")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": [*CITIES]}, "done": {"type": "boolean"}},
    "required": ["city", "done"],
    "additionalProperties": False,
}
_notes: list[str] = []
_called: list[str] = []


def write_note(text: str) -> str:
    """Write a word to the note.

    Args:
        text: the word.
    """
    _called.append("write_note")
    _notes.append(text)
    return f"kept-{text}"


def show_note(capitals: bool) -> str:
    """Show the note.

    Args:
        capitals: whether in capitals.
    """
    _called.append("show_note")
    text = _notes[-1] if _notes else "empty"
    return text.upper() if capitals else text


TOOLS = {"write_note": write_note, "show_note": show_note}


def report(answer: str | None, *structured: Any) -> None:
    """Print what came out: the calls, the last answer, and the structured answers as objects."""
    found = [one if isinstance(one, dict) else one.model_dump() for one in structured]
    print("REPORT " + json.dumps({"called": _called, "answer": answer, "structured": found}))
