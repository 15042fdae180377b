"""A leaving replica's cache goes to its peers: everything that fits arrives once, and evicts nothing as hot."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.samples import HEAT_MEMORY_S
from serve_app.cache.kv_chain import KvChain
from serve_app.engine.core.engine import TorchEngine
from serve_app.replica.lifecycle import handover as handover_module
from serve_app.replica.lifecycle.answers import TAKES_AT_ONCE
from serve_app.replica.lifecycle.handover import PIECES_IN_FLIGHT, HandOver, Receipt
from serve_app.replica.peers import Survey
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


def run(local: Local, engine: TorchEngine, *more: list[list[int]]) -> Receipt:
    """Hand over, and again after caching each list of prompts in ``more``."""
    receipt = Receipt()
    handover = HandOver(engine, local, SIZE, lambda: False, receipt)

    async def rounds() -> None:
        await handover.run(list(local.engines), 60.0)
        for prompts in more:
            for prompt in prompts:
                fill(engine, prompt)
            await handover.run(list(local.engines), 60.0)

    asyncio.run(rounds())
    return receipt


@given(Prompts, st.lists(Prompts, min_size=1, max_size=3), st.lists(Prompts, max_size=1))
def test_with_room_the_union_stays_whole_and_nothing_goes_twice(
    mine: list[list[int]], theirs: list[list[list[int]]], more: list[list[list[int]]]
) -> None:
    """A peer's own blocks stay; the others go to one peer; no peer gets a block twice.

    Blocks that the last streams cache after the first round follow in the second.

    docs: failures
    """
    leaving = filled(*mine)
    local = Local({f"peer {number}": filled(*prompts) for number, prompts in enumerate(theirs)})
    before = {name: hashes(engine) for name, engine in local.engines.items()}
    union = frozenset().union(*before.values())
    receipt = run(local, leaving, *more)
    after = frozenset().union(*map(hashes, local.engines.values()))
    assert after == union | hashes(leaving)
    assert len(local.sent) == len(set(local.sent)) == receipt.blocks.total()
    assert not any(block_hash in before[peer] for peer, block_hash in local.sent)
    new = hashes(leaving) - union
    assert new <= {block_hash for _, block_hash in local.sent}
    assert receipt.bytes == receipt.blocks.total() * BLOCK_BYTES
    assert receipt.skipped.total() == receipt.skipped["held_by_peer"] == len(hashes(leaving) & union)
    assert leaving.cache.pool.used_blocks == 0
    assert all(engine.cache.pool.used_blocks == 0 for engine in local.engines.values())
    assert sum(meters.taken_blocks.total() for meters in local.meters.values()) == receipt.blocks.total()


@given(Prompts, st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_small_peers_take_fitting_blocks_and_the_rest_is_counted(mine: list[list[int]], sizes: list[int]) -> None:
    """Every block is moved or skipped with a reason; peers' free space is filled, and no block of theirs evicted."""
    leaving = filled(*mine)
    local = Local({f"peer {number}": make_engine(size) for number, size in enumerate(sizes)})
    receipt = run(local, leaving)
    union = frozenset().union(*map(hashes, local.engines.values()))
    assert len(union) + receipt.skipped.total() == len(hashes(leaving))
    assert set(receipt.skipped) <= {"no_room"}
    assert all(engine.cache.evicted_blocks == 0 for engine in local.engines.values())
    if receipt.skipped and len(sizes) == 1:
        assert len(union) == sizes[0]


def test_the_hottest_goes_first_and_evicts_only_colder_blocks() -> None:
    """A full peer evicts the blocks unused for longest, and keeps blocks as hot as the arriving ones.

    docs: failures
    """
    now_s = [0.0]
    peer, leaving = make_engine(10), make_engine()
    for made in (peer, leaving):
        made.cache._clock = made.cache.quota.clock = made.transfer.clock = lambda: now_s[0]
    fill(peer, [5] * 20)
    now_s[0] += 5 * HEAT_MEMORY_S
    fill(peer, [6] * 20)
    fill(leaving, [2] * 21)
    for _ in range(5):
        fill(leaving, [1] * 21)
    now_s[0] += 1.0
    warm = hashes(peer) - hashes(filled([5] * 20))
    receipt = run(Local({"peer": peer}), leaving)
    assert hashes(peer) == warm | hashes(filled([1] * 21)), "the peer's warm blocks stay"
    assert peer.cache.evicted_blocks == 5
    assert receipt.skipped == {"no_room": 5}


def test_a_save_stays_a_save_with_its_owner_and_its_time() -> None:
    """This holds if a peer has its blocks already, and through two hand-overs in a row. (docs: failures)"""
    leaving, first, second = (make_engine(pins=40) for _ in range(3))
    ids = [1] * 40
    blocks = fill(leaving, ids, tenant="a")
    leaving.cache.pin(b"with an end", blocks[:5], 100.0, tenant="a", unread_s=30.0)
    leaving.cache.pin(b"without", blocks, None, tenant="b")
    fill(first, ids)
    for source, target in ((leaving, first), (first, second)):
        local = Local({"peer": target})
        receipt = run(local, source, [])
        assert (receipt.saves, receipt.saves_lost) == (2, 0)
        pins = {pin.key: pin for pin in target.cache.pins.soonest_first()}
        assert {key: (pin.tenant, len(pin.blocks), pin.ttl_s) for key, pin in pins.items()} == {
            b"with an end": ("a", 5, 100.0),
            b"without": ("b", 10, None),
        }
        assert 60.0 < pins[b"with an end"].expires_s - target.cache._clock() <= 70.0
        assert pins[b"without"].expires_s == math.inf


def test_a_save_goes_to_a_peer_with_space_in_its_budget() -> None:
    """A peer that cannot pin it is skipped; if none can, it counts as lost, but its blocks are still sent."""
    leaving = make_engine(pins=40)
    leaving.cache.pin(b"key", fill(leaving, [1] * 40), None)
    local = Local({"a": make_engine(pins=5), "b": make_engine(pins=20)})
    assert run(local, leaving).saves == 1
    assert list(local.engines["b"].cache.pins) == [b"key"]
    local = Local({"a": make_engine(pins=5)})
    receipt = run(local, leaving)
    assert (receipt.saves, receipt.saves_lost) == (0, 1)
    assert hashes(local.engines["a"]) == hashes(leaving)


@given(st.integers(0, 10))
def test_a_target_that_dies_is_replaced_by_the_next(answers: int) -> None:
    """All blocks that it had taken are on the living peer."""
    leaving = filled([0] * 40, [1] * 40)
    leaving.cache.pins.budget_blocks = 64
    leaving.cache.pin(b"key", fill(leaving, [2] * 12), None)
    local = Local({"dies": make_engine(), "lives": make_engine(pins=30)}, {"dies": answers})
    receipt = run(local, leaving)
    alone = Local({"dies": make_engine()}, {"dies": answers})
    assert hashes(local.engines["lives"]) | hashes(local.engines["dies"]) >= hashes(leaving)
    if answers <= 3:
        assert hashes(local.engines["lives"]) == hashes(leaving)
        assert receipt.saves == 1
        assert receipt.lost == {"dies"}
    receipt = run(alone, leaving)
    assert 23 - receipt.blocks.total() <= receipt.skipped.total() <= 23  # blocks that the dead one had taken count too
    assert set(receipt.skipped) <= {"peer_lost", "no_peers"}


def test_a_full_target_is_followed_by_the_next() -> None:
    """A peer with the prefix and space for one more block gets that; the whole prefix goes to one where it fits."""
    leaving = filled([0] * 20 + [1] * 20)
    small, large = make_engine(6), make_engine()
    for _ in range(3):
        fill(small, [0] * 21)
    receipt = run(Local({"small": small, "large": large}), leaving)
    assert hashes(large) == hashes(leaving)
    assert receipt.skipped == {"held_by_peer": 5}


def test_blocks_that_a_target_evicted_since_its_answer_are_sent_too() -> None:
    """The same holds for blocks that it is still computing: its answer is a hint."""
    leaving, peer = filled([0] * 20 + [1] * 20, [2] * 20), filled([0] * 20)

    class Forgetful(Local):
        async def survey(self, peer: str, runs: Sequence[bytes]) -> Survey:
            answer = await super().survey(peer, runs)
            self.engines[peer].reset_prefix_cache()
            return answer

    receipt = run(Forgetful({"peer": peer}), leaving)
    assert hashes(peer) == hashes(leaving)
    assert receipt.blocks.total() == 15


@pytest.mark.anyio
async def test_a_second_round_without_time_leaves_the_receipt_as_it_was() -> None:
    """It may end before this replica's list or before a peer's answer."""
    leaving, receipt = filled([0] * 40), Receipt()

    class Hangs(Local):
        hangs = False

        async def survey(self, peer: str, runs: Sequence[bytes]) -> Survey:
            if self.hangs:
                await asyncio.Event().wait()
            return await super().survey(peer, runs)

    local = Hangs({"peer": make_engine(6)})
    handover = HandOver(leaving, local, SIZE, lambda: False, receipt)
    await handover.run(["peer"], 60.0)
    assert receipt.skipped == {"no_room": 4}
    await handover.run(["peer"], -1.0)
    assert receipt.skipped == {"no_room": 4}
    local.hangs = True
    await handover.run(["peer"], 0.2)
    assert receipt.skipped.total() == 4
    assert receipt.blocks.total() == 6


@pytest.mark.anyio
async def test_a_target_fetches_a_part_when_it_is_its_turn() -> None:
    """Until then the part is a reference to bytes elsewhere."""
    leaving = filled([0] * 40)
    prefix = leaving.transfer.hot_prefixes().prefix(0)
    part = leaving.transfer.export_prefix(prefix)
    assert part is not None
    local = Local({"peer": make_engine()})
    begun: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def fetch() -> KvChain:
        go_on = asyncio.Event()
        begun.put_nowait(go_on)
        await go_on.wait()
        return part

    takes = [asyncio.create_task(local.answers["peer"].take_kv(prefix, 0, [fetch()], "prefix")) for _ in range(5)]
    for _ in takes:
        go_on = await begun.get()
        assert begun.qsize() < TAKES_AT_ONCE
        go_on.set()
    assert await asyncio.gather(*takes) == [10] * 5


def test_the_time_bounds_it_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside streams it is slower; without time nothing is moved and nothing raised."""
    leaving = filled([0] * 40)
    slow_bytes_per_s = PIECE_BLOCKS * BLOCK_BYTES / 1000  # a piece takes far longer than everything else
    monkeypatch.setattr(handover_module, "BUSY_BYTES_PER_S", slow_bytes_per_s)

    def moved(time_s: float, *, busy: bool) -> Receipt:
        receipt = Receipt()
        local = Local({"peer": make_engine()})
        run_at_once(HandOver(leaving, local, SIZE, lambda: busy, receipt).run(["peer"], time_s))
        assert len(hashes(local.engines["peer"])) == receipt.blocks.total()
        return receipt

    pace_s = 1000.0 * PIECES_IN_FLIGHT  # of each piece, as this many may be in flight
    for pieces in (1, 2, 3):
        receipt = moved((pieces - 0.5) * pace_s, busy=True)
        assert receipt.blocks.total() == pieces * PIECE_BLOCKS
        assert receipt.skipped == {"time": 10 - pieces * PIECE_BLOCKS}
    assert moved(0.5 * pace_s, busy=False).blocks.total() == 10
    assert moved(-1.0, busy=False).blocks.total() == 0


def test_tenants_shares_hold_at_the_receiver() -> None:
    """A leaving replica's flood evicts no tenant's blocks within its share; public blocks stay public."""
    shares = {"a": 1.0, "b": 1.0}
    peer = make_engine(20, tenant_shares=shares)
    fill(peer, [7] * 32, tenant="b")
    leaving = make_engine(tenant_shares=shares)
    for token in range(6):
        for _ in range(3):
            fill(leaving, [token] * 16, scope=replace(SCOPE, salt=b"a"), tenant="a")
    fill(leaving, [9] * 16, scope=replace(SCOPE, public_blocks=2), tenant="a")
    run(Local({"peer": peer}), leaving)
    held = peer.cache.quota.holdings()
    assert held["b"] >= 6, held
    assert held["(public)"] == 2


def test_another_model_takes_nothing() -> None:
    leaving = filled([0] * 40)
    receipt = run(Local({"peer": make_engine(model="another")}), leaving)
    assert receipt.skipped == {"refused": 10}
    assert not receipt.blocks
