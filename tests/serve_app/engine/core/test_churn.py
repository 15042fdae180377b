"""The engine keeps nothing of ended requests: a short churn of everything, with all blocks and tables checked."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.cache.prefix_digest import scope_digest
from tests.harness.churn.audit import Imbalance, tables
from tests.harness.churn.churn import Churn

LEFT_BYTES_AN_OPERATION = 500
"""A kept request would take well over a thousand; cached data varies a little between checks."""


@pytest.fixture
def churn(demo_model_path: Path, tmp_path: Path) -> Iterator[Churn]:
    made = Churn(demo_model_path, tmp_path)
    yield made
    made.close()


def test_churn_leaves_nothing_behind(churn: Churn) -> None:
    """At every check blocks are conserved, events match held blocks, and answers are equal; memory does not grow."""
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
    for outcome in ("saved", "adapters loaded", "refused: UnknownAdapter", "refused: RequestTooLong"):
        assert churn.done[outcome], f"nothing was {outcome}"


def test_the_audit_finds_lost_and_leaked_blocks(churn: Churn) -> None:
    """It fails for a block without an owner, and for one that is held but not announced."""
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
