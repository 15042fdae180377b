"""A new replica's copies: the plan, its order, and the outcome if peers fail."""

import asyncio
import tracemalloc
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import HASH_BYTES, hash_at, split_chain
from serve_app.cache.prefix.hot_prefixes import KINDS, HotPrefixes, PrefixRun
from serve_app.config.app import AppConfig
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import AdapterSpec
from serve_app.replica.lifecycle import prewarm as prewarm_module
from serve_app.replica.lifecycle.handover import Receipt
from serve_app.replica.lifecycle.prewarm import Prewarm, plan
from serve_app.replica.peers import PulledPart, Question, WantedPart
from tests.harness.virtual_time import run_at_once
from tests.serve_app.replica.lifecycle.peers import (
    BLOCK_BYTES,
    PIECE_BLOCKS,
    SCOPE,
    SIZE,
    Local,
    Prompts,
    fill,
    filled,
    hashes,
    make_engine,
)


async def no_adapter(spec: AdapterSpec) -> str:
    raise AssertionError(spec)


def config(blocks: int = 1000, time_s: float = 60.0, most_adapters: int = 0) -> AppConfig:
    limits = {"prewarm_max_bytes": blocks * BLOCK_BYTES, "prewarm_timeout_s": time_s, "max_cpu_loras": most_adapters}
    return AppConfig(block_size=SIZE).model_copy(update=limits)


def run(local: Local, engine: TorchEngine, blocks: int = 1000, time_s: float = 60.0) -> Receipt:
    return asyncio.run(Prewarm(engine, local, no_adapter, config(blocks, time_s)).run(list(local.engines)))


@given(st.lists(Prompts, min_size=1, max_size=3), st.integers(0, 60))
def test_a_plan_keeps_to_its_budget_and_order(held: list[list[list[int]]], most_blocks: int) -> None:
    """Each block is planned once and after its parent, as many as fit, by kind, and from a peer that has it.

    docs: failures
    """
    offers = {}
    for number, prompts in enumerate(held):
        engine = filled(*prompts)
        if prompts:
            blocks = fill(engine, prompts[0])
            engine.cache.pins.budget_blocks = 64
            engine.cache.pin(b"save", blocks)
        offers[f"peer {number}"] = engine.transfer.hot_prefixes()
    pieces = plan(offers, most_blocks)
    everything = {one: [] for hot in offers.values() for run in hot.runs for one in split_chain(run.hashes)}
    for peer, hot in offers.items():
        for one in (one for run in hot.runs for one in split_chain(run.hashes)):
            everything[one].append(peer)
    planned: list[bytes] = []
    for number, piece in enumerate(pieces):
        mine = [hash_at(piece.prefix.chain, i) for i in range(piece.first, piece.last)]
        before = hash_at(piece.prefix.chain, piece.first - 1) if piece.first else None
        assert before is None or before in planned
        assert (piece.after is None) == (before is None)
        assert piece.after is None or piece.after < number
        assert all(set(piece.holders) <= set(everything[one]) for one in mine)
        planned += mine
    assert len(planned) == len(set(planned)) == min(most_blocks, len(everything))
    assert [KINDS.index(piece.kind) for piece in pieces] == sorted(KINDS.index(piece.kind) for piece in pieces)


def test_a_plan_does_not_copy_a_long_beginning_for_each_prefix_that_has_it() -> None:
    """A thousand chats about one document of 32,000 tokens would need 160 kB each."""
    document = PrefixRun(
        None, Random(0).randbytes(2000 * HASH_BYTES), bytes(2000 * 64), SCOPE, "default", "prefix", 9.0
    )
    chats = [replace(document, parent=0, hashes=Random(n).randbytes(16), token_ids=bytes(64)) for n in range(1, 1001)]
    offer = HotPrefixes((document, *chats))
    tracemalloc.start()
    try:
        pieces = plan({"peer": offer}, 10_000)
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(piece.blocks for piece in pieces) == 3000
    assert most_bytes < 16 * 1024 * 1024


@given(st.lists(Prompts, min_size=1, max_size=3), st.integers(1, 60))
def test_planned_blocks_arrive(held: list[list[list[int]]], most_blocks: int) -> None:
    """Only these arrive, in pieces; none is in use afterwards, and holders keep their blocks."""
    local = Local({f"peer {number}": filled(*prompts) for number, prompts in enumerate(held)})
    before = {name: hashes(engine) for name, engine in local.engines.items()}
    new = make_engine()
    receipt = run(local, new, most_blocks)
    everything = frozenset().union(*before.values())
    assert hashes(new) <= everything
    assert len(hashes(new)) == receipt.blocks.total() == min(most_blocks, len(everything))
    assert receipt.bytes == len(hashes(new)) * BLOCK_BYTES
    assert not receipt.skipped
    assert receipt.state == "done"
    assert new.cache.pool.used_blocks == 0
    assert {name: hashes(engine) for name, engine in local.engines.items()} == before
    assert all(wanted.most_blocks <= PIECE_BLOCKS and not wanted.demote for _, wanted in local.asked)


@given(st.integers(0, 8))
def test_a_peer_that_dies_is_replaced_by_the_next(answers: int) -> None:
    """Shared blocks come from the other peer; the dead peer's own blocks are skipped, and the start continues.

    docs: failures
    """
    local = Local({"dies": filled([0] * 40, [1] * 40), "lives": filled([0] * 40)}, {"dies": answers})
    new = make_engine()
    receipt = run(local, new)
    assert hashes(local.engines["lives"]) <= hashes(new)
    known = 20 if answers else 10
    assert len(hashes(new)) + receipt.skipped.total() == known
    assert set(receipt.skipped) <= {"peer_lost", "parent_missing"}
    if answers <= 4:  # it is asked five times for the blocks that only it holds
        assert receipt.lost == {"dies"}


def test_the_time_bounds_it_for_any_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that never answers uses up the budget; blocks that arrived earlier stay. (docs: failures)"""

    class Stuck(Local):
        async def fetch(self, holder: str, wanted: WantedPart) -> PulledPart:
            if self.asked:
                await asyncio.Event().wait()
            return await super().fetch(holder, wanted)

    local = Stuck({"peer": filled([0] * 40)})
    new = make_engine()
    monkeypatch.setattr(prewarm_module, "ANSWER_PART", 0.01)  # else the peer would be given up first
    receipt = run_at_once(Prewarm(new, local, no_adapter, config(time_s=1.0)).run(["peer"]))
    assert receipt.blocks.total() == len(hashes(new)) == PIECE_BLOCKS
    assert receipt.skipped == {"time": 10 - PIECE_BLOCKS}


@pytest.mark.parametrize("hangs_at", ["offer_hot", "export_kv"])
def test_a_peer_that_hangs_leaves_time_for_the_others(hangs_at: str) -> None:
    """All blocks that another peer holds too arrive in time."""

    class Hangs(Local):
        async def _ask(self, question: Question, peer: str, *args: Any) -> Any:
            if (peer, question) == ("hangs", hangs_at):
                await asyncio.Event().wait()
            return await super()._ask(question, peer, *args)

    local = Hangs({"hangs": filled([0] * 40), "lives": filled([0] * 40)})
    new = make_engine()
    receipt = run_at_once(Prewarm(new, local, no_adapter, config(time_s=8.0)).run(["hangs", "lives"]))
    assert hashes(new) == hashes(local.engines["lives"])
    assert not receipt.skipped


def test_without_peers_it_is_over_at_once() -> None:
    assert run(Local({}), make_engine()).to_json()["blocks"] == 0


def test_another_model_gives_nothing_and_a_full_pool_takes_only_fitting_blocks() -> None:
    """An old version's replica may serve other weights; a small pool is filled, but nothing of it evicted."""
    new = make_engine()
    receipt = run(Local({"other": filled([0] * 40, model="another")}), new)
    assert not hashes(new)
    assert receipt.skipped == {"refused": 10}
    local, small = Local({"peer": filled([0] * 40)}), make_engine(7)
    assert run(local, small).blocks.total() == 7
    assert small.cache.evicted_blocks == 0
    half_full = filled([9] * 16, blocks=7)
    receipt = run(local, half_full)
    assert (receipt.blocks.total(), half_full.cache.evicted_blocks) == (3, 0), "its own blocks stay"
    assert receipt.skipped["no_room"] == 0, "blocks without space are not requested"


def test_arriving_blocks_are_on_their_tenants_accounts() -> None:
    """Public blocks are on the public account; a scope's blocks do not serve another scope. (docs: failures)"""
    local = Local({"peer": make_engine()})
    fill(local.engines["peer"], [0] * 40, scope=replace(SCOPE, public_blocks=3), tenant="a")
    fill(local.engines["peer"], [1] * 20, scope=replace(SCOPE, salt=b"other"), tenant="b")
    new = make_engine(tenant_shares={"a": 1.0, "b": 1.0})
    receipt = run(local, new)
    assert new.cache.quota.holdings() == {"(public)": 3, "a": 7, "b": 5}
    assert receipt.blocks == {"public": 3, "prefix": 12}
    assert len(fill(new, [1] * 20, tenant="a")) == 5
    assert len(hashes(new)) == 20


@pytest.mark.parametrize(
    ("here", "most", "loaded"), [((), 2, ["x", "y"]), (("x@1",), 3, ["y", "z"]), ((), 9, ["x", "y", "z"])]
)
def test_hot_adapters_are_loaded_as_memory_allows(
    here: tuple[str, ...], most: int, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last used by any peer are loaded first; one that cannot be loaded is left out."""
    seen: list[str] = []
    local = Local({"p": make_engine(), "q": make_engine()})
    for peer, names in (("p", ["x", "z"]), ("q", ["y", "x", "bad"])):
        specs = tuple(AdapterSpec(name, "1", "/path") for name in names)
        local.answers[peer].adapters = lambda specs=specs: specs

    async def load(spec: AdapterSpec) -> str:
        if spec.name == "bad":
            return "unfit"
        seen.append(spec.name)
        return ""

    engine = make_engine()
    monkeypatch.setattr(engine, "adapters", SimpleNamespace(loaded=here))
    receipt = asyncio.run(Prewarm(engine, local, load, config(most_adapters=most)).run(["p", "q"]))
    assert seen == loaded
    assert receipt.adapters == len(loaded)
