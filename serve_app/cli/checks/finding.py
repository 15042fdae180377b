"""What a check looks at, and what it finds."""

from dataclasses import dataclass, field
from typing import Literal

from serve_app.config.app import AppConfig

RunPlace = Literal["start", "here", "elsewhere"]
"""The place of an instance: here and now, with its model fetched; this machine; other machines with other files."""


@dataclass(frozen=True, slots=True)
class Look:
    """What is looked at. ``listens``: the instance's host and port."""

    place: RunPlace = "here"
    settings: AppConfig = field(default_factory=AppConfig)
    listens: tuple[str, int] = ("127.0.0.1", 8000)


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence about a subject, and the remedy, unless the sentence has it.

    ``subject``: a part of the machine, or a place in the settings, as names and numbers, "" for all of them.
    ``line``: the place's line in a file, from 1. With a "problem" an instance would not start or not work.
    """

    subject: str
    found: str
    advice: str = ""
    state: Literal["ok", "warning", "problem"] = "ok"
    line: int = 0

    @property
    def sentence(self) -> str:
        """The finding with its remedy."""
        return f"{self.found}: {self.advice}" if self.advice else self.found

    def told(self, file: str = "") -> str:
        """Return the finding as lines of text. ``file``: the file it is about, "" for none."""
        if file:
            place, note = f"{self.subject}: " if self.subject else "", "note: " if self.state != "problem" else ""
            return f"{file}:{self.line}: {place}{note}{self.sentence}"
        sign = "PROBLEM" if self.state == "problem" else f"{self.state:<7}"
        return f"{sign}  {self.subject}: {self.found}" + (f"\n         -> {self.advice}" if self.advice else "")


def problem(subject: str, found: str, advice: str = "") -> Finding:
    """Return a finding that keeps an instance from working."""
    return Finding(subject, found, advice, "problem")
