"""Counts how answers compare with the undisturbed ones, and keeps the first examples of those that differ."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from tests.harness.crashes.questions import Question, Reply

EXAMPLES = 5


class Broken(Exception):
    """An answer that is none: ``kind`` says "lost" (an error in its place) or "cut" (an error within it)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Tally:
    """Answers that were the same, lost, cut or altered."""

    def __init__(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._examples: list[dict[str, Any]] = []

    def add(self, question: Question, expected: Reply, got: Reply | Broken) -> None:
        """Compare one answer."""
        outcome = got.kind if isinstance(got, Broken) else "same" if got == expected else "altered"
        self._outcomes[outcome] += 1
        if outcome != "same" and len(self._examples) < EXAMPLES:
            shown = repr(got) if isinstance(got, Broken) else asdict(got)
            self._examples.append({"question": dict(question.body), "expected": asdict(expected), "got": shown})

    def results(self) -> dict[str, Any]:
        """Return the counts and the examples."""
        counts = {kind: self._outcomes[kind] for kind in ("lost", "cut", "altered")}
        return {"answers": self._outcomes.total(), **counts, "examples": self._examples}
