"""A run's requests: one seed makes them, and what one engine answers is what every undisturbed one does."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.end_to_end.autoscale.scenarios import TWO_PHASE, timeline
from benchmarks.end_to_end.autoscale.traffic import TrafficShape, shots_of, undisturbed

SHAPE = TrafficShape(tokens_per_id=16, output_shrink=16, max_blocks=6)
SPANS = timeline(TWO_PHASE, 12.0)
ENGINE = {"model": "demo", "engine": "simulated", "block_size": 16, "num_blocks": 500}


def test_a_seed_makes_the_requests() -> None:
    """The same bodies at the same times; every fourth answer is long where that is asked for, and nothing else."""
    shots = shots_of(SPANS, 4.0, "demo", SHAPE, 5)
    assert shots == shots_of(SPANS, 4.0, "demo", SHAPE, 5) != shots_of(SPANS, 4.0, "demo", SHAPE, 6)
    assert len(shots) > 20 and all(0.0 <= shot.at_s < SPANS[-1].end_s for shot in shots)
    assert len({shot.body["seed"] for shot in shots}) == len(shots)
    long = shots_of(SPANS, 4.0, "demo", replace(SHAPE, long_tokens=99), 5)
    for number, (shot, other) in enumerate(zip(shots, long, strict=True)):
        assert other.body["prompt"] == shot.body["prompt"]
        assert other.body["max_tokens"] == (99 if number % 4 == 0 else shot.body["max_tokens"])


def test_undisturbed_answers_do_not_depend_on_order_or_cache() -> None:
    """Asked again the other way round, with caches filled, each request has the same answer, and its own."""
    shots = shots_of(SPANS, 2.0, "demo", SHAPE, 5)[:16]
    done: list[None] = []
    answers = undisturbed([*shots, *shots[::-1]], ENGINE, lambda: done.append(None))
    texts = [answer.text for answer in answers]
    assert len(done) == len(texts) == 32 and all(texts) and len(set(texts)) == 16
    assert texts[16:] == texts[15::-1]
