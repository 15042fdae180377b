"""What a check is told and what it yields: a finding says what was looked at, what it is like, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from serve_app.config.app import AppConfig

State = Literal["ok", "warning", "problem"]
"""With a problem an instance would not start or not work; a warning is worth knowing."""

Place = Literal["start", "here", "elsewhere"]
"""Where an instance is to run: here and now, its model being fetched; on this machine; on others, with other files."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """``subject``: a setting, or a word for what was looked at; ``advice``: "" where ``found`` says what to do."""

    subject: str
    state: State
    found: str
    advice: str = ""

    @property
    def sentence(self) -> str:
        """What was found and what to do, in one."""
        return f"{self.found}: {self.advice}" if self.advice else self.found


def problem(subject: str, found: str, advice: str = "") -> Finding:
    """Return a finding that keeps an instance from working."""
    return Finding(subject, "problem", found, advice)


def judged(subject: str, found: str, advice: str) -> Finding:
    """Return a finding that is a problem where there is something to do."""
    return Finding(subject, "problem" if advice else "ok", found, advice)


def warning(subject: str, found: str, advice: str) -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(subject, "warning", found, advice)


@dataclass(frozen=True, slots=True)
class Case:
    """What is to run, and where."""

    settings: AppConfig = field(default_factory=AppConfig)
    place: Place = "start"
    host: str = "127.0.0.1"
    port: int = 8000

    def looks_into(self, path: Path) -> bool:
        """Return whether a file that the settings name is to be looked into, or missed.

        Relative paths of a Serve config start where some process of Ray will run.
        """
        path = path.expanduser()
        return self.place == "start" or path.exists() or (self.place == "here" and path.is_absolute())
