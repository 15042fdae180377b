"""Rates of a replica, fitted to a file or of a card."""

import numpy as np
import pytest

from serve_app.replay.rates import CARDS, ENOUGH, card_rates, recorded_rates, with_rates
from serve_app.traffic.record import RecordedModel

TOKENS = np.linspace(100, 10_000, 200)


def fitted(facts: RecordedModel | None, ttft_s: np.ndarray, requests: int = 200) -> object:
    answers = np.full(requests, 11)
    return recorded_rates(facts, TOKENS[:requests], ttft_s[:requests], answers, ttft_s[:requests] + 10 * 0.03)


def test_what_a_file_tells_of_its_replicas_is_taken() -> None:
    facts = RecordedModel(
        prefill_tokens_per_s=500.0, decode_step_s=0.03, decode_each_s=0.001, max_num_seqs=7, pull_tokens_per_s=9000.0
    )
    rates = recorded_rates(facts, TOKENS, 0.05 + TOKENS / 500.0, np.ones(200), np.ones(200))
    assert rates is not None
    assert (rates.prefill_tokens_per_s, rates.pull_tokens_per_s, rates.max_num_seqs) == (500.0, 9000.0, 7)
    assert rates.decode_s(1) == pytest.approx(0.03)
    assert rates.overhead_s == pytest.approx(0.05)


def test_without_facts_rates_are_fitted_to_the_times() -> None:
    rng = np.random.default_rng(0)
    queues_s = rng.exponential(1.0, 200) * (rng.random(200) < 0.5)
    rates = fitted(None, 0.05 + TOKENS / 2000.0 + queues_s)
    assert rates.prefill_tokens_per_s == pytest.approx(2000.0, rel=0.1)  # type: ignore[attr-defined]
    assert rates.decode_step_s == pytest.approx(0.03, rel=0.1)  # type: ignore[attr-defined]


def test_few_requests_fit_nothing() -> None:
    assert fitted(None, TOKENS / 2000.0, ENOUGH - 1) is None


def test_a_card_that_is_not_known_is_told_with_the_nearest() -> None:
    rates, pool_tokens = card_rates("L40S", 16_000_000_000, 2, 131_072)
    assert rates.prefill_tokens_per_s > 5000.0
    assert pool_tokens > 100_000
    assert with_rates(rates, 7.0, 0.5).decode_step_s == 0.5
    with pytest.raises(ValueError, match="did you mean h100"):
        card_rates("h10", 1, 2, 1)
    with pytest.raises(ValueError, match="do not fit 1 x l4"):
        card_rates("l4", int(CARDS["l4"].memory_bytes), 2, 1)
