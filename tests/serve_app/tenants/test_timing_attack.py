"""A tenant that guesses another one's prompts learns nothing from how long the first token takes.

Time here is what it is made of: the prompt tokens that had to be computed, of a real engine under the real keys
(docs/security.md).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.timing_attack import Stage, attack, auc

TRIALS = 220


@pytest.mark.parametrize("mode", ["private", "public_prompt", "trust_group_public_prompt"])
def test_guessing_does_no_better_than_chance(mode: str, tiny_model_path: Path) -> None:
    """With the public prompt in front or not; in a trust group the same attack succeeds, so that it is one.

    docs/security.md
    """
    stage = Stage(tiny_model_path, mode, public_tokens=40, guess_tokens=24)
    try:
        outcome = attack(stage, TRIALS, seed=5)
    finally:
        stage.close()
    assert len(outcome.sent) == len(outcome.unsent) == TRIALS // 2
    found = auc(outcome.sent, outcome.unsent)
    if mode.startswith("trust_group"):
        assert found > 0.9
    else:
        assert 0.45 <= found <= 0.55
    # What is public is shared all the same, always: of 40 tokens and the marks around them, two or three whole blocks.
    (cached,) = set(outcome.unsent)
    assert cached in ((32, 48) if mode.endswith("public_prompt") else (0,))


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
)
def test_the_auc_is_the_share_of_pairs_in_order(positive: list[int], negative: list[int]) -> None:
    pairs = [(p, n) for p in positive for n in negative]
    expected = sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)
    assert auc(positive, negative) == pytest.approx(expected)
