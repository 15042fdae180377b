"""The engine keeps nothing of what has ended: a short churn of everything at once, every block and table looked at."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.cache.prefix_digest import scope_digest
from tests.harness.churn.audit import Imbalance, tables
from tests.harness.churn.churn import Churn

LEFT_BYTES_AN_OPERATION = 500
"""A request that is kept is well over a thousand; what is cached varies a little from check to check."""


@pytest.fixture
def churn(demo_model_path: Path, tmp_path: Path) -> Iterator[Churn]:
    made = Churn(demo_model_path, tmp_path)
    yield made
    made.close()


def test_churn_leaves_nothing_behind(churn: Churn) -> None:
    """At every check blocks are conserved, events tell what is held, answers are the same; what is allocated stays."""
    ours = [tracemalloc.Filter(True, f"*/{room}/*") for room in ("serve_app", "router")]
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(7):
            churn.run(20)
            churn.check()
            scope_digest.cache_clear()  # of bounded size
            found = tracemalloc.take_snapshot().filter_traces(ours).statistics("filename")
            sizes.append(sum(trace.size for trace in found))
    finally:
        tracemalloc.stop()
    assert sizes[-1] < max(sizes[:4]) + 3 * 20 * LEFT_BYTES_AN_OPERATION, sizes
    ended = churn.ledger.ended
    assert not ended["error"]
    assert ended["length"] > 50 and ended["cancelled"] > 2
    for what in ("saved", "adapters loaded", "refused: UnknownAdapter", "refused: RequestTooLong"):
        assert churn.done[what], f"nothing was {what}"


def test_the_audit_sees_what_is_lost_and_what_is_left(churn: Churn) -> None:
    """It can fail: on a block that nobody has, and on one that is announced and not held."""
    assert tables(churn.engine)["BlockPool._references"] == 128
    churn.check()
    cache = churn.engine._cache
    block = cache.pool._free.pop()
    with pytest.raises(Imbalance, match="127 of 128 blocks"):
        churn.check()
    cache.pool._free.append(block)
    churn.check()
    churn.ledger.announced["pool"].pop()
    with pytest.raises(Imbalance, match="announced"):
        churn.check()
