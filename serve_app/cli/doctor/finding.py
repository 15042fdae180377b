"""One thing that was looked at: what it is like, and what to do where it is not as it should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]
"""With a problem an instance would not start or not work; a warning is worth knowing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``subject``: a word for what was looked at; ``advice``: one line, "" where all is well."""

    subject: str
    state: State
    found: str
    advice: str = ""


def problem(subject: str, found: str, advice: str) -> Finding:
    """Return a finding that keeps an instance from working."""
    return Finding(subject, "problem", found, advice)


def warning(subject: str, found: str, advice: str) -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(subject, "warning", found, advice)
