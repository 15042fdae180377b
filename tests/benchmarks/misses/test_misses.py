"""Misses are explained rightly, on forms of differences that no rule was written for."""

from __future__ import annotations

from pathlib import Path

from benchmarks.misses.cases import cases
from benchmarks.misses.run import cost_us, explained, score
from serve_app.tokenization.tokenizer import PromptTokenizer


def test_halves_share_no_form() -> None:
    """There are at least 200 cases; each form lies in one half, and each class in both."""
    develop, held_out = cases(held_out=False), cases(held_out=True)
    assert len(develop) + len(held_out) >= 400 and len(held_out) >= 200
    assert not {case.form for case in develop} & {case.form for case in held_out}
    assert {case.reason for case in develop} == {case.reason for case in held_out}


def test_held_out_misses_are_explained(demo_model_path: Path) -> None:
    """Precision and recall of every class, and over all, are at least 0.95."""
    tokenizer = PromptTokenizer(demo_model_path)
    scores = score([(case.reason, explained(case, tokenizer).reason) for case in cases(held_out=True)])
    low = {name: each for name, each in scores.items() if min(each["precision"], each["recall"]) < 0.95}
    assert not low
    assert cost_us(tokenizer, 100, repeats=1) > 0


def test_scores_are_counted_right() -> None:
    """One of two dates is taken for text, and one text for a date."""
    scores = score([("date", "date"), ("date", "text"), ("text", "date"), ("text", "text")])
    assert scores["date"] == {"cases": 2, "precision": 0.5, "recall": 0.5}
    assert scores["all named"] == {"cases": 2, "precision": 0.5, "recall": 0.5}
