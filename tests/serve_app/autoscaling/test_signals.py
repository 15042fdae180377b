"""Figures become signals only where they are complete, fresh and of one version; ingresses' are merged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.autoscaling import IngressFigures, ReplicaFigures
from serve_app.autoscaling.signals import OLD_AFTER_S, signals

REPLICA = ReplicaFigures(
    version=1, arrived_tokens=1e6, queued_tokens=8000, prefill_tokens_per_s=4000, running=10, waiting=2, slots=16,
    pool_tokens=4e5, used_tokens=1e5, pinned_tokens=1000, pin_budget_tokens=1e5,
    hands_over=1,
)  # fmt: skip
INGRESS = IngressFigures(
    requests=100, p90_ttft_s=2.0, p90_own_s=1.0, mean_own_s=0.5, waiting_requests=4, working_set_tokens=1e5,
    min_replicas=1, max_replicas=8, target_ttft_s=2.0, upscale_delay_s=10, downscale_delay_s=600,
)  # fmt: skip


def test_sums_means_and_what_waits_at_the_door() -> None:
    """Two replicas and two ingresses, one with three times the traffic."""
    busy = replace(INGRESS, requests=300, p90_ttft_s=4.0, waiting_requests=0, working_set_tokens=5e4)
    seen = signals(2, ["a", "b"], {"a": (0.5, REPLICA), "b": (1.0, REPLICA)}, [(0.1, INGRESS), (0.2, busy)])
    assert seen.fault == ""
    token_s = 1.1 / 4000  # ten that decode slow it by a tenth
    assert seen.token_s == pytest.approx(token_s)
    assert seen.backlog_s == pytest.approx(16_000 * token_s + 4 * 0.5)
    assert (seen.decoding, seen.slots, seen.used_tokens, seen.pool_tokens) == (24, 16, 2e5, 4e5)
    assert (seen.requests, seen.p90_ttft_s, seen.working_set_tokens) == (400, pytest.approx(3.5), 1e5)


@pytest.mark.parametrize(
    ("replicas", "ingresses", "words"),
    [
        ({}, [(0.0, INGRESS)], "2 of 2 replicas"),
        ({"a": (0.0, REPLICA)}, [(0.0, INGRESS)], "1 of 2 replicas"),
        ({"a": (0.0, REPLICA), "b": (OLD_AFTER_S + 1, REPLICA)}, [(0.0, INGRESS)], "1 of 2 replicas"),
        ({"a": (0.0, REPLICA), "b": (0.0, REPLICA)}, [], "no ingress"),
        ({"a": (0.0, REPLICA), "b": (0.0, REPLICA)}, [(OLD_AFTER_S + 1, INGRESS)], "no ingress"),
        ({"a": (0.0, REPLICA), "b": (0.0, replace(REPLICA, version=2))}, [(0.0, INGRESS)], "two versions"),
    ],
)
def test_what_is_missing_old_or_mixed_is_a_fault(replicas: Any, ingresses: Any, words: str) -> None:
    assert words in signals(2, ["a", "b"], replicas, ingresses).fault
    assert signals(2, [], replicas, ingresses).fault == "no replica runs"


@given(st.dictionaries(st.sampled_from([*REPLICA.to_floats(), "other"]), st.floats() | st.just(1.0)))
def test_nonsense_is_refused_and_figures_survive_the_way(floats: dict[str, float]) -> None:
    """Whatever a report holds, it is figures or a ValueError; what was written is read."""
    assert ReplicaFigures.of(REPLICA.to_floats()) == REPLICA
    try:
        figures = ReplicaFigures.of({**REPLICA.to_floats(), **floats})
    except ValueError:
        return
    assert all(0.0 <= value < float("inf") for value in figures.to_floats().values())
