"""Broken HTTP over a raw socket: docs/security.md."""

from __future__ import annotations

import asyncio

import pytest

from tests.harness.raw_http import make_case, run_cases

pytestmark = pytest.mark.integration

CASES = range(120)


def test_broken_requests_get_a_4xx_or_an_end_and_a_neighbour_its_answers(url: str) -> None:
    """No server error, nobody left hanging, and the same answer for whoever asks meanwhile."""
    assert len({make_case(seed, "demo").kind for seed in CASES}) == 10
    found = asyncio.run(run_cases(url, "demo", CASES))
    assert (found.server_errors, found.hangs) == ([], [])
    assert set(found.neighbour) == {"equal"}
    assert found.statuses["400"] > len(CASES) // 4
