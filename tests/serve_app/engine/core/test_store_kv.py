"""A request that stores nothing gets hits like any other, and leaves nothing behind."""

import numpy as np
import pytest
from msgspec import structs

from router.protocol.events import BlocksStored, Event
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.engine.protocol import EngineRequest
from tests.serve_app.conftest import MakeEngine
from tests.serve_app.engine.tiny import SCOPE, SECRET, prompt, request, run_all

SHARED = prompt(160)


def asking(name: str, store_kv: bool = False) -> EngineRequest:
    return structs.replace(request(name, np.append(SHARED, prompt(40, 1)), 40), store_kv=store_kv)


def test_it_hits_existing_blocks_and_announces_nothing(make_engine: MakeEngine) -> None:
    """A repetition of the request finds only others' blocks, and has the same answer."""
    events: list[Event] = []
    engine = make_engine(events=events)
    run_all(engine, [request("first", SHARED, 1)])
    held, told = set(engine._cache.index._by_hash), len(events)
    got = [run_all(engine, [asking("p")]) for _ in range(2)]
    assert [one.cached["p"] for one in got] == [160, 160]
    assert got[0].tokens["p"] == got[1].tokens["p"]
    assert set(engine._cache.index._by_hash) == held
    assert not any(isinstance(event, BlocksStored) for event in events[told:])
    assert engine._cache.pool.used_blocks == 0
    ids = asking("p").token_ids
    chain = engine._cache.prompt_chain(SCOPE, SCOPE.root(SECRET), ids)
    offered = engine.transfer.export_prefix(HashedTokens(SCOPE, ids, chain))
    assert offered is not None and offered.header.blocks == 10
    assert run_all(engine, [asking("s", store_kv=True)]).tokens["s"] == got[0].tokens["p"]


@pytest.mark.parametrize("first", ["passing", "storing"])
def test_two_at_once_never_share_the_unstored_blocks(first: str, make_engine: MakeEngine) -> None:
    """The one that stores nothing waits for the other, never the reverse; both answers are right."""
    engine = make_engine(max_num_batched_tokens=48)
    both = [asking("p"), asking("s", store_kv=True)]
    got = run_all(engine, both if first == "passing" else both[::-1])
    assert got.tokens["p"] == got.tokens["s"]
    # 200 tokens: 12 whole blocks that can be hit.
    assert (got.cached["s"], got.cached["p"]) == ((0, 0) if first == "passing" else (0, 192))
    assert len(engine._cache.index) == 239 // 16
    assert run_all(engine, [asking("again")]).cached["again"] == 192
