"""The index of public tokens equals looking at every prompt."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serve_app.tokenization.public_tokens import PublicTokens

IDS = st.lists(st.one_of(st.integers(0, 2), st.sampled_from([255, 256, 70000])), max_size=9)


def naive(prompts: list[list[int]], ids: list[int]) -> int:
    best = 0
    for prompt in prompts:
        for length in range(min(len(prompt), len(ids)) + 1):
            if prompt[:length] == ids[:length]:
                best = max(best, length)
    return best


@given(st.lists(IDS, max_size=6), st.lists(IDS, min_size=1, max_size=4))
def test_the_longest_public_beginning_is_found(prompts: list[list[int]], asked: list[list[int]]) -> None:
    """Any set of prompts: empty ones, equal ones, one inside another."""
    index = PublicTokens(np.array(prompt, dtype=np.int32) for prompt in prompts)
    for ids in [*asked, *([*prompt, 1] for prompt in prompts)]:
        assert index.count(np.array(ids, dtype=np.int32)) == naive(prompts, ids)
