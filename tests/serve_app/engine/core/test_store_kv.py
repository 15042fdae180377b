"""A request that stores nothing takes hits like any other, and leaves nothing for anybody."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from router.protocol.events import BlocksStored, Event
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.engine.protocol import EngineRequest
from tests.serve_app.conftest import MakeEngine
from tests.serve_app.engine.kv.test_tier_loader import SMALL, tiers
from tests.serve_app.engine.tiny import SCOPE, SECRET, prompt, request, run_all, sample

SHARED = prompt(160)


def passing(name: str, own: int, max_tokens: int = 40) -> EngineRequest:
    """One of the shared prompt that stores nothing."""
    return replace(request(name, np.append(SHARED, prompt(40, own)), max_tokens), store_kv=False)


def storing(name: str, own: int, max_tokens: int = 40) -> EngineRequest:
    return replace(passing(name, own, max_tokens), store_kv=True)


def test_it_hits_what_is_there_and_announces_nothing(make_engine: MakeEngine) -> None:
    """Also the same request again finds only what others stored, and answers the same."""
    events: list[Event] = []
    engine = make_engine(events=events)
    run_all(engine, [request("first", SHARED, 1)])
    held, told = engine._cache.index.hashes(), len(events)
    got = [run_all(engine, [passing("p", 1)]) for _ in range(2)]
    assert [one.cached["p"] for one in got] == [160, 160]
    assert got[0].tokens["p"] == got[1].tokens["p"]
    assert engine._cache.index.hashes() == held
    assert not any(isinstance(event, BlocksStored) for event in events[told:])
    assert engine._cache.pool.used_blocks == 0
    ids = passing("p", 1).token_ids
    offered = engine.export_prefix(HashedTokens(SCOPE, ids, engine._cache.prompt_chain(SCOPE, SCOPE.root(SECRET), ids)))
    assert offered is not None and offered.header.blocks == 10
    assert run_all(engine, [storing("s", 1)]).tokens["s"] == got[0].tokens["p"]


@pytest.mark.parametrize("first", ["passing", "storing"])
def test_two_at_once_never_share_what_the_one_computes(first: str, make_engine: MakeEngine) -> None:
    """Who stores nothing waits for whoever stores, and nobody waits for it; both are right."""
    engine = make_engine(max_num_batched_tokens=48)
    both = [passing("p", 1), storing("s", 1)]
    got = run_all(engine, both if first == "passing" else both[::-1])
    assert got.tokens["p"] == got.tokens["s"]
    # 200 tokens: 12 whole blocks that can be hit.
    assert (got.cached["s"], got.cached["p"]) == ((0, 0) if first == "passing" else (0, 192))
    assert len(engine._cache.index) == 239 // 16
    assert run_all(engine, [passing("again", 1)]).cached["again"] == 192


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_nothing_of_it_goes_below_the_pool(kind: str, tmp_path: Path, make_engine: MakeEngine) -> None:
    """Not when the pool is full, and not at the end, when what it holds goes to disk."""
    engine = make_engine(tiers=tiers(kind, tmp_path), **SMALL)
    run_all(engine, [passing(f"p{own}", own, 8) for own in range(4)])
    engine.stop()
    assert len(engine._cache.index) == sample(engine, "warmpath_kv_tier_stores_total", tier=kind) == 0
