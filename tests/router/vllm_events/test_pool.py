"""vLLM's events: refused batches, and the pool's blocks over histories with losses, repairs and resets."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from router.directory import Directory
from router.protocol.block_hash import PrefixScope, hash_blocks, private_parent
from router.protocol.events import ENDS_TIER, BlocksRemoved, BlocksStored, CacheCleared, CacheDigest, Event, TierDigest
from router.vllm_events.batches import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    MalformedBatch,
    decode_batch,
)
from router.vllm_events.pool import UnsupportedEvents, VllmPool
from router.vllm_events.subscriber import EventSubscriber
from tests.conformance.kv_events.laws import Checker
from tests.router.vllm_events.pool_model import (
    OTHER,
    ROOT,
    STORED,
    PoolModel,
    Request,
    Routers,
    chain,
    encode,
    stored,
)

BLOCKS, SIZE = 10, 2
KEPT = 3
"""Batches that the engine can send again."""

SCOPES = (
    (PrefixScope("m", salt=b"a"), None),
    (PrefixScope("m", "x@1", b"a"), "x@1"),
    (PrefixScope("m", salt=b"b"), None),
)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class Line(EventSubscriber):
    """A subscriber that catches up from ``published``, not from a socket. ``forgot``: whether batches were lost."""

    published: list[bytes]
    forgot = False

    def _catch_up(self, context: Any) -> None:
        first = max(0, len(self.published) - KEPT)
        self.forgot |= first > self._expected
        for number in range(first, len(self.published)):
            self._take(number, self.published[number])


class PoolMachine(RuleBasedStateMachine):
    """Requests start, grow, end, are preempted; prefixes are pinned; the cache is reset; batches are lost."""

    running = Bundle("running")
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PoolModel(BLOCKS, SIZE)
        self.held = VllmPool(SIZE, BLOCKS)
        self.line = Line("", "", self.held, self.tell)
        self.line.published = []
        self.checker = Checker(BLOCKS)
        self.on_the_way: list[tuple[int, bytes]] = []
        self.routers = Routers()
        self.directory = Directory(SIZE)
        self.directory.add_replica("r")
        self.prompts: list[tuple[bytes, list[int]]] = []

    @rule(target=running, scope=st.sampled_from(SCOPES), tokens=TOKENS, chunk=st.integers(1, 12))
    def begin(self, scope: tuple[PrefixScope, str | None], tokens: list[int], chunk: int) -> object:
        root = scope[0].root(b"k")
        self.prompts.append((root, tokens))
        begun = self.pool.begin(root, scope[1], tokens, chunk)
        return multiple() if begun is None else begun

    @rule(target=running, request=consumes(running), more=TOKENS)
    def grow(self, request: Request, more: list[int]) -> object:
        """It continues, or is preempted if there is no space."""
        request.tokens += more
        if self.pool.proceed(request, len(request.tokens)):
            return request
        self.pool.end(request)
        return multiple()

    @rule(request=consumes(running))
    def end(self, request: Request) -> None:
        self.pool.end(request)

    @rule(target=pins, request=running)
    def pin(self, request: Request) -> list[int]:
        blocks = request.blocks[: request.hashed]
        self.pool.touch(blocks)
        return blocks

    @rule(blocks=consumes(pins))
    def unpin(self, blocks: list[int]) -> None:
        self.pool.release(list(reversed(blocks)))

    @rule(lost=st.booleans())
    def step(self, lost: bool) -> None:
        """The engine publishes its events, and the batch may be lost."""
        events, published = self.pool.take_events(), self.line.published
        if events:
            published.append(encode(events))
            self.checker.batch(len(published) - 1, published[-1])
            if not lost:
                self.on_the_way.append((len(published) - 1, published[-1]))

    @rule(batches=st.integers(1, 4))
    def hear(self, batches: int) -> None:
        for _ in range(min(batches, len(self.on_the_way))):
            self.line._hear(*self.on_the_way.pop(0), None)  # type: ignore[arg-type]

    @rule()
    def reset(self) -> None:
        """Once the reset is heard, routers know of no earlier block."""
        self.line.cleared.clear()
        if self.pool.reset():
            self.step(lost=False)
            self.hear(len(self.on_the_way))
            assert self.line.cleared.is_set()
            assert self.routers.held() == set()

    @rule()
    def catch_up(self) -> None:
        """After a silence the subscriber asks the engine, and then nothing is missing."""
        self.step(lost=True)
        self.hear(len(self.on_the_way))
        self.line._catch_up(None)
        assert self.line._expected == len(self.line.published)
        if self.line.forgot:
            assert self.routers.held() <= self.pool.held()
        else:
            assert self.routers.held() == self.pool.held()
            self.check_matches()

    def check_matches(self) -> None:
        """The router predicts exactly the pool's own hit."""
        for root, tokens in self.prompts[-10:]:
            chain = hash_blocks(root, np.array(tokens, dtype=np.int32), SIZE)
            lora = next(lora for scope, lora in SCOPES if scope.root(b"k") == root)
            hit = len(self.pool.match(Request(root, lora, tokens), len(tokens)))
            assert self.directory.match(chain).get("r", 0) == hit * SIZE
            assert self.held.count_held(chain, len(tokens)) == hit

    @invariant()
    def reports_its_blocks(self) -> None:
        """Reported blocks equal held blocks and are bounded; reporting them again gives the same."""
        assert len(self.routers.held()) == len(self.held) <= BLOCKS
        assert self.directory.blocks_held("r").get("pool", 0) == len(self.held)
        said: list[Event] = []
        self.line._sink, anew = said.extend, Routers()
        self.line.tell(anew=True)
        self.line._sink = self.tell
        *blocks, digest = said
        assert isinstance(digest, CacheDigest)
        assert self.routers.mirror.holds(digest)
        anew(blocks)
        assert anew.mirror.holds(digest)

    def tell(self, events: Sequence[Event]) -> None:
        self.routers(events)
        self.directory.apply("r", events)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def pack(events: list[Any], *rest: Any) -> bytes:
    return msgspec.msgpack.encode([2.5, events, *rest])


def test_future_fields_are_ignored_and_absent_ones_are_none() -> None:
    """A newer vLLM sends more fields, and an adapter or a rank may be absent."""
    event = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": [1, 2]}
    removed = {"type": "BlockRemoved", "block_hashes": [b"7"], "locality": "LOCAL"}
    batch = decode_batch(pack([{**event, "block_size": 2}, removed, {"type": "AllBlocksCleared"}]))
    assert batch == KvEventBatch(2.5, [BlockStored([7], None, [1, 2], 2), BlockRemoved([b"7"]), AllBlocksCleared()])


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (b"\xff\x00garbage", "not a batch"),
        (msgspec.msgpack.encode({"ts": 1.0, "events": []}), "not a batch"),
        (pack([{"block_hashes": [7]}]), "missing required field `type`"),
        (pack([{"type": "BlockMoved", "block_hashes": [7]}]), "BlockMoved"),
        (pack([{"type": "BlockRemoved"}]), "missing required field `block_hashes`"),
        (pack([STORED, stored(token_ids=[1, 2**31])]), r"token_ids"),
    ],
)
def test_an_unreadable_batch_is_an_error_with_a_reason(payload: bytes, sentence: str) -> None:
    with pytest.raises(MalformedBatch, match=sentence):
        decode_batch(payload)


@given(st.binary(max_size=64))
def test_no_bytes_raise_anything_else(payload: bytes) -> None:
    with suppress(MalformedBatch):
        decode_batch(payload)


def told(pool: VllmPool, *events: Any, rank: int | None = 0) -> list[Event]:
    return pool.translate(KvEventBatch(1.0, list(events), rank))


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_name": "x@1", "extra_keys": [("x@1", ROOT.hex())]},
        {"lora_name": OTHER.hex(), "extra_keys": [(OTHER.hex(), ROOT.hex())]},
        {"kv_cache_spec_kind": "mla_attention"},
    ],
    ids=["an adapter", "an adapter named like a root", "mla"],
)
def test_a_chain_is_put_under_its_root(changes: dict[str, Any]) -> None:
    assert told(VllmPool(2, 8), stored(**changes), rank=None) == [BlocksStored(chain(1, 2))]


@pytest.mark.parametrize(
    "changes",
    [
        *({"extra_keys": keys} for keys in (None, [None], [()], [("short",)], [("g" * 32,)], [(7,)])),
        {"extra_keys": [(ROOT.hex().upper().replace("7", "A"),)]},
        {"extra_keys": [(ROOT.hex(), "image")]},
        {"lora_name": OTHER.hex(), "extra_keys": [(OTHER.hex(),)]},
        {"parent_block_hash": b"?", "extra_keys": None},
        {"parent_block_hash": b"0", "extra_keys": [(("image", 0),)]},
    ],
)
def test_a_block_without_our_root_or_not_of_tokens_alone_is_ignored(changes: dict[str, Any]) -> None:
    """Tokens do not identify an image, and a block with an unknown parent has no hash of ours; both are ignored."""
    pool = VllmPool(2, 8)
    parent = stored(block_hashes=[b"0"], token_ids=[0, 0])
    assert told(pool, parent, stored(**changes), BlockRemoved([b"1"])) == [BlocksStored(chain(0, 0))]


def test_a_block_is_reported_while_all_its_ancestors_are_held() -> None:
    """A public parent may be removed first; when it returns, so do the private blocks after it that are still held."""
    pool, public, private = VllmPool(2, 8), chain(1, 2), b"p" * 16
    behind = hash_blocks(private_parent(private, public), np.arange(4, dtype=np.int32), 2)
    first, last = behind[:16], behind[16:]
    keys: list[Any] = [(ROOT.hex(),), (private.hex(),), None]
    both = stored(block_hashes=[b"1", b"2", b"3"], token_ids=[1, 2, 0, 1, 2, 3], extra_keys=keys)
    assert told(pool, both) == [BlocksStored(public + behind)]
    assert pool.roots_of(public + behind, 1) == ROOT + private
    assert told(pool, BlockRemoved([b"1"])) == [BlocksRemoved(last + first + public)]
    assert (pool.count_held(public + behind, 3), len(pool), pool.xor) == (0, 0, 0)
    assert told(pool, BlockRemoved([b"3"])) == []
    assert told(pool, STORED) == [BlocksStored(public + first)]
    assert [held.root for _, held in pool.blocks()] == [ROOT, private]


def test_more_blocks_than_the_pool_has_mean_that_removals_were_lost() -> None:
    """The pool bounds the memory."""
    pool = VllmPool(2, 2)
    told(pool, STORED, stored(block_hashes=[b"2"], token_ids=[3, 4]))
    events = told(pool, stored(block_hashes=[b"3"], token_ids=[5, 6]))
    assert events == [CacheCleared(), BlocksStored(chain(5, 6))]
    assert len(pool) == 1


def test_events_that_routers_cannot_use_are_an_error_with_a_sentence() -> None:
    with pytest.raises(UnsupportedEvents, match="set block_size to 128"):
        told(VllmPool(2, 8), stored(block_size=128, token_ids=[0] * 128))
    with pytest.raises(UnsupportedEvents, match="data parallel rank 1"):
        told(VllmPool(2, 8), STORED, rank=1)


@pytest.mark.parametrize("event", [stored(medium="CPU"), stored(token_ids=[1, 2, 3, 4])], ids=["offloaded", "left out"])
def test_blocks_that_cannot_be_placed_are_counted_and_nobodys(event: BlockStored) -> None:
    """Neither storing nor removing them changes the reports of other blocks."""
    pool = VllmPool(2, 8)
    first = stored(block_hashes=[b"0"], token_ids=[0, 0])
    assert told(pool, first, event) == [BlocksStored(chain(0, 0))]
    assert told(pool, BlockRemoved(event.block_hashes, event.medium, 0)) == []
    assert (pool.unplaced, len(pool)) == (len(event.block_hashes), 1)


PROMPT = chain(1, 2, 3, 4, 5, 6)
LEADING = stored(
    block_hashes=[b"1", b"2", b"3"], token_ids=[1, 2, 3, 4, 5, 6], extra_keys=[(ROOT.hex(),), None, None], group_idx=1
)


def state(*names: bytes, group: int = 0) -> BlockStored:
    """Return a step's event of layers with a state: it has all blocks' tokens, but keeps only the last block."""
    return stored(
        block_hashes=list(names), token_ids=[1, 2, 3, 4, 5, 6], extra_keys=None, group_idx=group,
        kv_cache_spec_kind="mamba",
    )  # fmt: skip


def ends(*tokens: int) -> BlocksStored:
    return BlocksStored(chain(*tokens)[-16:], ENDS_TIER)


def test_a_prompt_is_served_as_far_as_every_group_continues() -> None:
    """With states, a block counts while each group holds its own part, reported in any order."""
    pool = VllmPool(2, 20, states=True)
    assert told(pool, state(b"3"), LEADING) == [ends(1, 2, 3, 4, 5, 6)]
    assert [pool.count_held(PROMPT, most) for most in (3, 2)] == [3, 0]
    assert told(pool, state(b"2")) == [ends(1, 2, 3, 4)]
    assert [pool.count_held(PROMPT, most) for most in (3, 2, 1)] == [3, 2, 0]
    assert told(pool, state(group=2)) == []
    assert told(pool, state(b"3", group=2), BlockRemoved([b"2"], "GPU", 0)) == [
        BlocksRemoved(chain(1, 2, 3, 4)[-16:], ENDS_TIER)
    ]
    assert pool.count_held(PROMPT, 3) == 3
    assert told(pool, BlockRemoved([b"3"], "GPU", 1)) == [BlocksRemoved(PROMPT[-16:], ENDS_TIER)]
    assert pool.held_blocks == 4
    assert told(pool, AllBlocksCleared()) == [CacheCleared()]
    assert told(pool, LEADING) == [], "no state is known"


def test_nothing_is_reported_of_a_model_with_a_window_beside_states() -> None:
    """Its requests are routed by load."""
    pool = VllmPool(2, 20, states=True)
    window = msgspec.structs.replace(LEADING, group_idx=2, kv_cache_spec_kind="sliding_window")
    assert told(pool, state(b"3"), LEADING, window) == []
    assert told(pool, state(b"2")) == []
    assert (pool.count_held(PROMPT, 3), pool.unplaced) == (0, 3)


@given(
    needed=st.integers(1, 4),
    steps=st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 9)), max_size=40),
)
def test_a_window_continues_from_any_whole_window(needed: int, steps: list[tuple[bool, bool, int]]) -> None:
    """Two prompts differ after four blocks; any block may be removed. The result equals vLLM's own rule."""
    pool, directory = VllmPool(2, 30), Directory(2)
    directory.add_replica("r")
    tokens = {False: list(range(20)), True: [*range(8), *range(100, 112)]}
    names = {side: [b"%d" % ids[2 * i] for i in range(10)] for side, ids in tokens.items()}
    held: set[bytes] = set()
    for side, store, at in steps:
        name = names[side][at]
        if store == (name in held) or (store and at and names[side][at - 1] not in held):
            continue
        held ^= {name}
        event = BlockStored(
            [name], names[side][at - 1] if at else None, tokens[side][2 * at : 2 * at + 2], 2, "GPU", None,
            [None if at else (ROOT.hex(),)], 0, "sliding_window", 2 * needed + 1,
        ) if store else BlockRemoved([name], "GPU", 0)  # fmt: skip
        events = told(pool, event)
        directory.apply("r", events)
        for other, ids in tokens.items():
            hit = _vllm_window_hit([block in held for block in names[other]], needed)
            assert pool.count_held(chain(*ids), 10) == hit
            assert directory.match(chain(*ids)).get("r", 0) == 2 * hit
        assert directory.drift("r", CacheDigest((TierDigest(ENDS_TIER, len(pool), pool.xor),))) is None


def _vllm_window_hit(held: list[bool], needed: int) -> int:
    """Source: ``SlidingWindowManager.find_longest_cache_hit``."""
    row = 0
    for index in reversed(range(len(held))):
        row = row + 1 if held[index] else 0
        if row == needed:
            return index + needed
    return row


def test_an_event_that_contradicts_itself_is_malformed() -> None:
    with pytest.raises(MalformedBatch):
        told(VllmPool(2, 8), stored(extra_keys=[None, None]))
