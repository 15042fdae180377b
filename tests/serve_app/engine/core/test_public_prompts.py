"""Public blocks are shared by everybody, but nothing after them, in the pool and the tiers; what is not stored."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from router.protocol.block_hash import PrefixScope, extend_chain
from router.protocol.events import BlocksStored, Event
from serve_app.cache.kv_chain import TransferError, WrongScope
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.cache.prefix.quota import PUBLIC
from serve_app.engine.protocol import EngineRequest
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.kv.test_tier_loader import SMALL, tiers
from tests.serve_app.engine.tiny import SCOPE, SECRET, prompt, request, run_all, sample

PUBLIC_IDS = prompt(72, 99)
"""Four whole blocks and half of a fifth."""


def scope_of(tenant: str, public_blocks: int = 4) -> PrefixScope:
    return PrefixScope("tiny", salt=tenant.encode(), public_blocks=public_blocks)


def chat(request_id: str, tenant: str, private: int, seed: int, max_tokens: int = 4) -> EngineRequest:
    ids = np.concatenate((PUBLIC_IDS, prompt(private, seed)))
    return request(request_id, ids, max_tokens, scope=scope_of(tenant), tenant=tenant)


def test_tenants_share_public_blocks_and_nothing_after_them(make_engine: MakeEngine, reference: Reference) -> None:
    """The same prompt hits 64 tokens for another tenant, all full blocks for its own, and gives equal answers."""
    events: list[Event] = []
    engine = make_engine(events=events)
    got = run_all(engine, [chat("a1", "a", 40, 1)])
    for name, tenant in (("b1", "b"), ("a2", "a"), ("b2", "b")):
        got.cached |= (more := run_all(engine, [chat(name, tenant, 40, 1)])).cached
        got.tokens |= more.tokens
    assert got.cached == {"a1": 0, "b1": 64, "a2": 96 + 15 // 16 * 16, "b2": 96}
    expected = reference("qwen3", np.concatenate((PUBLIC_IDS, prompt(40, 1))), 4)
    assert all(tokens == expected for tokens in got.tokens.values())
    stored = b"".join(event.hashes for event in events if isinstance(event, BlocksStored))
    bare = chat("x", "a", 40, 1)
    hashes = extend_chain(bare.root, 4, bare.token_ids, 16)
    assert stored[: 16 * 7] == hashes
    assert run_all(engine, [structs.replace(bare, block_hashes=hashes)]).cached["x"] == 96, (
        "with hashes from outside, too"
    )
    assert engine.cache.quota.holdings()[PUBLIC] == 4


def test_an_answer_to_a_public_prompt_is_private(make_engine: MakeEngine) -> None:
    """The prompt has only public tokens; the tokens generated after them belong to its tenant. (docs: caching)"""
    engine = make_engine()
    ids = PUBLIC_IDS[:64]
    answer = run_all(engine, [request("a", ids, 40, scope=scope_of("a"), tenant="a")]).tokens["a"]
    whole = np.concatenate((ids, np.array(answer, dtype=np.int32)))
    again = [request(name, whole, 1, scope=scope_of(name[0]), tenant=name[0]) for name in ("b-too", "a-too")]
    got = run_all(engine, again[:1]).cached | run_all(engine, again[1:]).cached
    assert got == {"b-too": 64, "a-too": 96}


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_public_blocks_come_back_from_below_for_anybody(kind: str, tmp_path: Path, make_engine: MakeEngine) -> None:
    """One tenant's evicted blocks are loaded for another tenant, which still gets nothing private."""
    engine = make_engine(tiers=tiers(kind, tmp_path), **SMALL)
    run_all(engine, [chat("a", "a", 40, 1)])
    run_all(engine, [request("whole pool", prompt(24 * 16 - 8), 1, scope=scope_of("c", 0), tenant="c")])
    got = run_all(engine, [chat("b", "b", 40, 1)])
    assert got.cached["b"] == 64
    assert sample(engine, "warmpath_kv_tier_hits_total", tier=kind) == 4
    assert run_all(engine, [chat("again", "a", 40, 1)]).cached["again"] == 96


def test_an_export_serves_only_tenants_that_may_hit_it(make_engine: MakeEngine) -> None:
    """An export with a private end serves only its tenant; a wholly public one serves every tenant."""
    first, second = make_engine(), make_engine()
    mine = chat("a", "a", 40, 1)
    run_all(first, [mine])
    hashes = extend_chain(mine.root, 4, mine.token_ids, 16)
    exported = first.transfer.export_prefix(HashedTokens(mine.scope, mine.token_ids, hashes))
    public = first.transfer.export_prefix(HashedTokens(mine.scope, PUBLIC_IDS[:64], hashes))
    assert exported is not None
    assert public is not None
    theirs = chat("b", "b", 40, 1)
    with pytest.raises(WrongScope):
        second.transfer.import_part(exported, HashedTokens(theirs.scope, mine.token_ids, hashes, "b"), 0)
    with pytest.raises(TransferError):
        fewer = replace(mine.scope, public_blocks=2)
        second.transfer.import_part(exported, HashedTokens(fewer, mine.token_ids, hashes, "a"), 0)
    their_hashes = extend_chain(theirs.root, 4, theirs.token_ids, 16)
    assert second.transfer.import_part(public, HashedTokens(theirs.scope, theirs.token_ids, their_hashes, "b"), 0) == 4
    assert second.transfer.import_part(exported, HashedTokens(mine.scope, mine.token_ids, hashes, "a"), 0) == 7
    assert second.cache.quota.holdings() == {PUBLIC: 4, "a": 3}
    assert run_all(second, [theirs]).cached["b"] == 64


@pytest.mark.parametrize("first", [2, 4, 5])
def test_a_part_of_a_chain_travels_across_the_public_border(first: int, make_engine: MakeEngine) -> None:
    """A pull may begin in the public part or after it."""
    one, other = make_engine(), make_engine()
    mine = chat("a", "a", 40, 1)
    run_all(one, [mine])
    head, scope = mine.token_ids[: 16 * first + 1], scope_of("a", min(4, first))
    run_all(other, [request("head", head, 1, scope=scope, tenant="a")])
    hashes = extend_chain(mine.root, 4, mine.token_ids, 16)
    part = one.transfer.export_prefix(HashedTokens(mine.scope, mine.token_ids, hashes), first)
    assert part is not None
    assert other.transfer.import_part(part, HashedTokens(mine.scope, mine.token_ids, hashes, "a"), first) == 7
    theirs = chat("b", "b", 40, 1)
    with pytest.raises(TransferError):
        other.transfer.import_part(part, HashedTokens(theirs.scope, theirs.token_ids, hashes, "b"), first)


SHARED = prompt(160)


def asking(name: str, store_kv: bool = False) -> EngineRequest:
    return structs.replace(request(name, np.append(SHARED, prompt(40, 1)), 40), store_kv=store_kv)


def test_it_hits_existing_blocks_and_announces_nothing(make_engine: MakeEngine) -> None:
    """A repetition of the request finds only others' blocks, and has the same answer."""
    events: list[Event] = []
    engine = make_engine(events=events)
    run_all(engine, [request("first", SHARED, 1)])
    held, told = {entry.block_hash for entry in engine.cache.index}, len(events)
    got = [run_all(engine, [asking("p")]) for _ in range(2)]
    assert [one.cached["p"] for one in got] == [160, 160]
    assert got[0].tokens["p"] == got[1].tokens["p"]
    assert {entry.block_hash for entry in engine.cache.index} == held
    assert not any(isinstance(event, BlocksStored) for event in events[told:])
    assert engine.cache.pool.used_blocks == 0
    ids = asking("p").token_ids
    chain = engine.cache.prompt_chain(SCOPE, SCOPE.root(SECRET), ids)
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
    assert len(engine.cache.index) == 239 // 16
    assert run_all(engine, [asking("again")]).cached["again"] == 192
