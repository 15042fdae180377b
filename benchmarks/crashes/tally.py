"""Counts how answers compare with the undisturbed ones, by option."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from benchmarks.crashes.questions import Question, Reply

EXAMPLES = 5


class Broken(Exception):
    """An answer that is none: ``kind`` says "lost" (an error in its place) or "cut" (an error within it)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Tally:
    """Answers that were the same, lost, cut or altered, and the first examples of the others."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self._by_option: dict[str, Counter[str]] = {}
        self._examples: list[dict[str, Any]] = []

    @property
    def answers(self) -> int:
        """How many were compared."""
        return self.outcomes.total()

    def add(self, question: Question, expected: Reply, got: Reply | Broken) -> None:
        """Compare one answer."""
        outcome = got.kind if isinstance(got, Broken) else "same" if got == expected else "altered"
        self.outcomes[outcome] += 1
        for option in question.options:
            self._by_option.setdefault(option, Counter())[outcome] += 1
        if outcome != "same" and len(self._examples) < EXAMPLES:
            found = repr(got) if isinstance(got, Broken) else asdict(got)
            self._examples.append({"question": dict(question.body), "expected": asdict(expected), "got": found})

    def results(self) -> dict[str, Any]:
        """Return the counts, by option too."""
        return {
            "answers": self.answers,
            **{kind: self.outcomes[kind] for kind in ("lost", "cut", "altered")},
            "by_option": {
                option: {"answers": counts.total(), **{k: n for k, n in counts.items() if k != "same"}}
                for option, counts in sorted(self._by_option.items())
            },
            "examples": self._examples,
        }
