"""`benchmarks hostile`: what is known of a kind is told at once, on one line."""

from collections import Counter

from benchmarks.isolation.hostile.attacks import ATTACKS
from benchmarks.isolation.hostile.run import Watched, ratios, row


def test_a_row_tells_the_worst_first_and_why_it_is_not_whole() -> None:
    alone = Watched(health_s=[0.1, 0.2], ttft_s=[0.1], total_s=[0.2])
    beside = Watched(health_s=[0.1, 1.5], ttft_s=[0.3], total_s=[0.3], failed=["/health: 503", "late"])
    assert row("alone", alone.to_json()) == (
        "alone: /health 0.20 s at most, first token p99 0.10 s, answer p99 0.20 s"
    )  # fmt: skip
    figures = {
        **beside.to_json(),
        **ratios(alone, beside),
        "statuses": Counter({"400": 2, "200": 1}),
        "broken": "ended",
    }
    assert row("noise", figures) == (
        "noise: /health 1.50 s at most, first token p99 0.30 s (3.00x), answer p99 0.30 s (1.50x), 1 x 200, 2 x 400, "
        "failed: /health: 503, ended"
    )


def test_a_row_is_told_when_nothing_was_answered() -> None:
    nothing = Watched()
    assert row("noise", {**nothing.to_json(), **ratios(nothing, nothing)}) == "noise: /health 0.00 s at most"
    assert "noise" in ATTACKS
