"""Pulls between two real engines: equal tokens, one copy for all waiting requests, and computing after a failure."""

import asyncio
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from router.protocol.block_hash import PrefixScope, hash_blocks
from router.protocol.request import Decision
from serve_app.cache.kv_chain import KvChain
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.config.app import AppConfig
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import EngineRequest
from serve_app.replica import pull as pull_module
from serve_app.replica.lifecycle.answers import PeerAnswers
from serve_app.replica.lifecycle.handover import MoveMeters
from serve_app.replica.peers import HolderLost, PulledPart, WantedPart
from serve_app.replica.pull import Puller, PullMeters
from serve_app.replica.pull_rate import PullRate, expected_tokens_per_s
from serve_app.tracing import ReplicaTrace, traceparent_of
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.tiny import SCOPE, SECRET, Collector, prompt, request, run_all, sample
from tests.serve_app.tracing.spans import Recorded

pytestmark = pytest.mark.anyio

CONFIG = AppConfig(min_pull_tokens=32)


def keyed(item: EngineRequest) -> EngineRequest:
    """Return the request with block hashes, as a router sends it."""
    return structs.replace(item, block_hashes=hash_blocks(item.root, item.token_ids, 16))


def held(item: EngineRequest, tokens: int, holder: str = "holder") -> EngineRequest:
    """Return the request with a decision to pull its first tokens."""
    return structs.replace(item, decision=Decision("me", "router", 1, 0, 0, "cold", 0.0, holder, tokens))


class Holder:
    """The other replica: a real engine's exports, behind a gate."""

    def __init__(self, engine: TorchEngine) -> None:
        self.answers = PeerAnswers(engine, tuple, MoveMeters(), PullMeters())
        self.asked: list[WantedPart] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None

    async def fetch(self, holder: str, wanted: WantedPart) -> PulledPart:
        assert holder == "holder"
        self.asked.append(wanted)
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return await self.answers.export_kv(wanted)


def pair(first: TorchEngine, second: TorchEngine, ids: np.ndarray) -> tuple[Holder, Puller]:
    """Return a holder that has computed a prompt, and a puller from it."""
    run_all(first, [request("a", ids, 1)])
    holder = Holder(first)
    return holder, Puller(second, holder.fetch, CONFIG)


async def generate(engine: TorchEngine, puller: Puller, item: EngineRequest) -> Collector:
    """Submit a request as a replica does, and wait for its end."""
    collector = Collector()
    remote_kv = puller.begin(held(item, len(item.token_ids)))
    engine.submit(structs.replace(item, remote_kv=remote_kv), collector)
    await asyncio.to_thread(collector.wait, [item.request_id])
    return collector


@pytest.mark.parametrize(("piece_blocks", "held_tokens"), [(100, 0), (5, 0), (3, 64), (1, 100)])
async def test_a_pulled_prefix_gives_the_tokens_of_a_computed_one(
    piece_blocks: int, held_tokens: int, make_engine: MakeEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives piece by piece, also onto a held part; the request waits for it and then reuses it."""
    ids, second, held = prompt(200), make_engine(), held_tokens // 16
    monkeypatch.setattr(pull_module, "PIECE_BYTES", piece_blocks * second.kv_block_bytes)
    holder, puller = pair(make_engine(), second, ids)
    if held_tokens:
        run_all(second, [request("b", ids[:held_tokens], 1)])
    got = await generate(second, puller, keyed(request("c", ids, 12)))
    assert got.tokens["c"] == reference("qwen3", ids, 12)
    assert got.cached["c"] == 192
    assert [wanted.first for wanted in holder.asked] == list(range(held, 12, piece_blocks))
    assert puller.meters.ended == {"whole": 1}
    assert puller.meters.tokens == 192 - held * 16
    assert sample(second, "warmpath_kv_cache_blocks", state="used") == 0


async def test_all_requests_waiting_for_a_pull_have_it_in_their_traces(make_engine: MakeEngine) -> None:
    """The request that began it and the one that joined have its holder, outcome and tokens."""
    ids, recorded = prompt(160), Recorded()
    _, puller = pair(make_engine(), make_engine(), ids)
    root = recorded.tracer.begin("call", {})
    for name in ("begins", "joins"):
        item = keyed(request(name, ids, 1))
        trace = ReplicaTrace(recorded.tracer, traceparent_of(root), name, len(ids))
        assert puller.begin(held(item, len(ids)), trace) is not None
        assert puller.begin(held(item, len(ids))) is not None  # others are not traced
    await asyncio.gather(*puller._under_way)
    pulls = [span.attributes for span in recorded.spans()]
    assert [span.name for span in recorded.spans()] == ["pull", "pull"]
    assert [pull.pop("warmpath.joined") for pull in pulls] == [False, True]
    told = {"warmpath.holder": "holder", "warmpath.wanted_tokens": 144, "warmpath.pulled_tokens": 144}
    assert pulls == [{**told, "warmpath.outcome": "whole"}] * 2


async def test_a_hundred_requests_wait_for_one_copy(make_engine: MakeEngine, reference: Reference) -> None:
    """During the copy another prompt's request runs to its end; nobody computes the arriving blocks.

    docs: routing
    """
    ids, other = prompt(160), prompt(40, 9)
    second = make_engine(max_num_batched_tokens=512)
    holder, puller = pair(make_engine(), second, ids)
    holder.gate.clear()
    items = [keyed(request(f"c{n}", np.append(ids, np.int32(n)), 3)) for n in range(100)]
    collector = Collector()
    for n, item in enumerate(items):
        # Some name the holder, others come from a router that knows none.
        remote_kv = puller.begin(held(item, len(ids)) if n % 2 == 0 else item)
        assert remote_kv is not None
        assert not remote_kv.done
        second.submit(structs.replace(item, remote_kv=remote_kv), collector)
    assert second.load().queued_prefill_tokens == 100
    free = run_all(second, [request("free", other, 5)])
    assert free.tokens["free"] == reference("qwen3", other, 5)
    assert not collector.finish
    holder.gate.set()
    await asyncio.to_thread(collector.wait, [item.request_id for item in items])
    assert len(holder.asked) == 1
    assert (puller.meters.begun, puller.meters.joined) == (1, 99)
    assert set(collector.cached.values()) == {160}
    assert sample(second, "warmpath_prompt_tokens_computed_total") == 100 + len(other)
    for n in (0, 57):
        assert collector.tokens[f"c{n}"] == reference("qwen3", np.append(ids, np.int32(n)), 3)


async def test_nobody_waits_for_a_pull_that_begins_after_evicted_blocks(make_engine: MakeEngine) -> None:
    """The pull starts after blocks that were held then and evicted since: a later request gets its own pull."""
    ids, second = prompt(200), make_engine()
    holder, puller = pair(make_engine(), second, ids)
    run_all(second, [request("b", ids[:64], 1)])
    holder.gate.clear()
    assert puller.begin(held(keyed(request("begins", ids, 1)), 192)) is not None
    assert second.reset_prefix_cache()
    assert puller.begin(held(keyed(request("later", ids, 1)), 192)) is not None
    assert (puller.meters.begun, puller.meters.joined) == (2, 0)
    await puller.stop()


@pytest.mark.parametrize("piece_blocks", [100, 3])
async def test_a_holder_first_evicts_pulled_blocks(
    piece_blocks: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part shared with another conversation stays, and so does that conversation, though it is older.

    An export that serves no pull demotes nothing.

    docs: routing
    """
    system, moved, new = prompt(64), prompt(64, 1), prompt(97, 2)
    shared, moves = np.concatenate([system, prompt(33, 3)]), np.concatenate([system, moved, prompt(1, 4)])
    chains = [hash_blocks(SCOPE.root(SECRET), ids, 16) for ids in (shared, moves, new)]
    first, second = make_engine(num_blocks=14), make_engine()
    monkeypatch.setattr(pull_module, "PIECE_BYTES", piece_blocks * second.kv_block_bytes)
    run_all(first, [request("shared", shared, 1)])
    _, puller = pair(first, second, moves)
    assert first.transfer.export_prefix(HashedTokens(SCOPE, moves, chains[1])) is not None
    assert [first.cached_blocks(chain, 8) for chain in chains] == [6, 8, 0]
    got = await generate(second, puller, keyed(request("moves", moves, 1)))
    assert got.cached["moves"] == 128
    # Ten blocks are cached and four free: three of the seven wanted ones must be evicted.
    run_all(first, [request("new", new, 1)])
    assert [first.cached_blocks(chain, 8) for chain in chains] == [6, 5, 6]
    assert sample(first, "warmpath_kv_cache_blocks", state="used") == 0


@pytest.mark.parametrize("trouble", ["late", "holder_lost", "gone", "holder_busy", "invalid", "failed"])
async def test_any_failure_costs_time_only(
    trouble: str, make_engine: MakeEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is computed, its tokens are right, and the reason is counted. (docs: routing)"""
    ids = prompt(150)
    monkeypatch.setattr(pull_module, "UNKNOWN_DEADLINE_S", 0.2)
    first, second = make_engine(), make_engine()
    if trouble != "gone":
        run_all(first, [request("a", ids, 1)])
    holder = Holder(first)
    if trouble == "late":
        holder.gate.clear()
    elif trouble == "holder_lost":
        holder.failure = HolderLost("killed")
    elif trouble == "failed":
        holder.failure = RuntimeError("boom")
    elif trouble == "holder_busy":
        monkeypatch.setattr("serve_app.replica.lifecycle.answers.EXPORTS_AT_ONCE", -100)
    elif trouble == "invalid":
        export = first.transfer.export_prefix

        def corrupted(*args: Any, **kwargs: Any) -> KvChain:
            part = export(*args, **kwargs)
            assert part is not None
            part.payload[2, 7] ^= 1
            return part

        monkeypatch.setattr(first.transfer, "export_prefix", corrupted)
    puller = Puller(second, holder.fetch, CONFIG)
    got = await generate(second, puller, keyed(request("c", ids, 6)))
    assert got.tokens["c"] == reference("qwen3", ids, 6)
    assert got.cached["c"] == 0
    assert puller.meters.ended == {trouble: 1}
    assert puller.meters.tokens == 0
    assert not puller._under_way


async def test_a_holder_hands_out_exactly_the_asked_scope(make_engine: MakeEngine) -> None:
    """The same tokens under another salt or root are not found, nor are blocks after the chain's end.

    docs: routing
    """
    ids = prompt(100)
    engine = make_engine()
    mine, theirs = PrefixScope("tiny", salt=b"mine"), PrefixScope("tiny", salt=b"theirs")
    run_all(engine, [request("a", ids, 1, scope=mine)])
    holder, root = Holder(engine), mine.root(SECRET)

    async def ask(scope: PrefixScope, root: bytes, first: int = 0, most: int = 99) -> PulledPart:
        return await holder.fetch("holder", WantedPart(scope, hash_blocks(root, ids, 16), ids.tobytes(), first, most))

    foreign = theirs.root(SECRET)
    for scope, other, first in ((theirs, foreign, 0), (theirs, root, 0), (mine, foreign, 0), (mine, root, 6)):
        assert await ask(scope, other, first) == "gone"
    part = await ask(mine, root, first=2, most=3)
    assert isinstance(part, KvChain)
    assert part.header.blocks == 3
    assert part.header.hashes == hash_blocks(root, ids, 16)[2 * 16 : 5 * 16]
    assert sample(engine, "warmpath_kv_cache_blocks", state="used") == 0


async def test_a_replica_decides_again(make_engine: MakeEngine) -> None:
    """Nothing is pulled if off, held meanwhile, too short, slower than computing, or beyond the limit of pulls.

    docs: routing
    """
    ids = prompt(160)
    engine = make_engine()
    run_all(engine, [request("held", ids, 1)])
    assert engine.load().prefill_tokens_per_s > 0
    holder = Holder(engine)
    holder.gate.clear()

    def refusal(item: EngineRequest, **settings: object) -> str:
        puller = Puller(engine, holder.fetch, CONFIG.model_copy(update=settings))
        if settings.get("max_pulls"):
            assert puller.begin(held(keyed(request("x", prompt(160, 8))), 160)) is not None
        assert puller.begin(held(item, 160)) is None
        return next(iter(puller.meters.refused))

    new = keyed(request("new", prompt(160, 3)))
    assert refusal(new, kv_pull=False) == "off"
    assert refusal(keyed(request("again", ids))) == "held"
    assert refusal(keyed(request("longer", np.append(ids, prompt(20, 4))))) == "held"
    assert refusal(new, min_pull_tokens=161) == "short"
    assert refusal(new, max_pulls=1) == "busy"
    puller = Puller(engine, holder.fetch, CONFIG)
    for _ in range(20):
        puller._rate.observe(1, 1e6, puller._clock())
    assert puller.begin(held(new, 160)) is None
    assert puller.meters.refused == {"slow": 1}
    assert puller.begin(new) is None
    assert not holder.asked


async def test_a_waiting_request_can_be_cancelled_and_stopping_ends_pulls(make_engine: MakeEngine) -> None:
    """Neither leaves anything behind; when its replica stops pulling, a waiting request continues without."""
    ids = prompt(100)
    engine = make_engine()
    holder = Holder(engine)
    holder.gate.clear()
    puller = Puller(engine, holder.fetch, CONFIG)
    collector = Collector()
    for name in ("left", "stays"):
        item = keyed(request(name, ids, 2))
        engine.submit(structs.replace(item, remote_kv=puller.begin(held(item, 96))), collector)
    engine.cancel("left")
    await asyncio.to_thread(collector.wait, ["left"])
    assert collector.finish == {"left": "cancelled"}
    await puller.stop()
    await asyncio.to_thread(collector.wait, ["stays"])
    assert collector.finish["stays"] == "length"
    assert engine.load().queued_prefill_tokens == 0


def test_a_fast_replica_tries_one_copy_and_learns_that_it_is_slow() -> None:
    """The figures of an H100 with an 8B model: a rate that is never measured would keep it from copying for ever."""
    rate, computed_per_s = PullRate(expected_tokens_per_s(16, 16 * 131_072)), 33_000
    assert rate.tokens_per_s(0.0) > computed_per_s
    rate.observe(768, 0.67, 1.0)
    assert rate.tokens_per_s(1.0) < computed_per_s
    assert rate.tokens_per_s(1000.0) > computed_per_s


def test_the_rate_is_learned_and_forgotten() -> None:
    """It moves to the measured rate, and back to the expectation long after the measurement. (docs: routing)"""
    rate = PullRate(expected_tokens_per_s(16, 40_000_000))
    expected = rate.tokens_per_s(0.0)
    assert expected == pytest.approx(2400.0)
    for second in range(20):
        rate.observe(100, 1.0, float(second))
    assert rate.tokens_per_s(20.0) == pytest.approx(110, rel=0.1)
    rate.observe(0, 30.0, 21.0)
    assert rate.tokens_per_s(21.0) < 60
    assert rate.tokens_per_s(2000.0) == expected
