"""A trace as requests: texts share tokens as the ids do, and tenants ask with their own keys."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.prompts import tokenizer_of
from benchmarks.common.trace import DEFAULT_TRACE
from benchmarks.common.trace_text import TraceText, trace_shots, with_tenants
from serve_app.checkpoints.reuse import TraceRequest, read_trace
from serve_app.checkpoints.sources import resolve_model

IDS = st.lists(st.integers(0, 1 << 30), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model("demo")


def tokens_of(model: Path, text: str) -> np.ndarray:  # type: ignore[type-arg]
    return tokenizer_of(model).encode(text, b"\0" * 16).token_ids


def common(one: np.ndarray, other: np.ndarray) -> int:  # type: ignore[type-arg]
    shortest = min(len(one), len(other))
    differs = np.flatnonzero(one[:shortest] != other[:shortest])
    return int(differs[0]) if len(differs) else shortest


@settings(max_examples=60)
@given(IDS, IDS, st.sampled_from([16, 64]), st.integers(0, 511))
def test_prompts_share_tokens_exactly_as_far_as_ids_are_equal(
    model: Path, one: list[int], other: list[int], tokens_per_id: int, short: int
) -> None:
    """Equal ids give equal tokens; the first different id differs within its first few tokens."""
    text = TraceText(model, tokens_per_id)
    requests = [TraceRequest(0.0, 512 * len(ids) - short, 8, tuple(ids)) for ids in (one, other)]
    found = [tokens_of(model, text.prompt(request)) for request in requests]
    for request, tokens in zip(requests, found, strict=True):
        assert len(tokens) == text.prompt_tokens(request)
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    shared = common(*found)
    whole = min(same * tokens_per_id, len(found[0]), len(found[1]))
    assert whole <= shared < whole + 16


def test_the_published_trace_is_dealt_to_all_tenants(model: Path) -> None:
    """All its prompts share one first block; those after it tell conversations apart. Times shrink as tokens do."""
    trace = read_trace(DEFAULT_TRACE, 40)
    dealt = trace_shots(trace, TraceText(model, 8), "demo", 2.0, {"a": "ka", "b": "kb"})
    assert {(shot.tenant, shot.api_key) for shot in dealt} == {("a", "ka"), ("b", "kb")}
    assert dealt[-1].at_s == pytest.approx((trace[-1].arrival_s - trace[0].arrival_s) / 2.0 / 64)


def test_tenants_ask_with_their_own_keys(model: Path) -> None:
    """A server is told of each tenant, and of no key in plain; without tenants it needs none."""
    trace = [TraceRequest(0.0, 600, 8, (number, 9), tenant) for number, tenant in enumerate(("acme", "zeta", "acme"))]
    shots, flags = with_tenants(trace_shots(trace, TraceText(model, 8), "demo", 1.0, {}))
    assert len({shot.api_key for shot in shots}) == 2 and shots[0].api_key == shots[2].api_key
    [settings_flag] = flags
    assert "acme" in settings_flag and "zeta" in settings_flag
    assert not any(shot.api_key in settings_flag for shot in shots)
    alone = trace_shots([TraceRequest(0.0, 600, 8, (1, 2))], TraceText(model, 8), "demo", 1.0, {})
    assert with_tenants(alone) == (alone, [])
