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
from router.vllm_events.order import BatchOrder
from router.vllm_events.pool import FollowedPool, UnsupportedEvents
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


class Line(BatchOrder):
    """Catches up from ``published``. ``forgot``: whether batches were lost."""

    published: list[bytes]
    forgot = False

    def catch_up(self) -> None:
        first = max(0, len(self.published) - KEPT)
        self.forgot |= first > self.expected
        for number in range(first, len(self.published)):
            self.take(number, self.published[number])


class PoolMachine(RuleBasedStateMachine):
    """Requests start, grow, end, are preempted; prefixes are pinned; the cache is reset; batches are lost."""

    running = Bundle("running")
    pins = Bundle("pins")
    lookahead = 0

    def __init__(self) -> None:
        super().__init__()
        self.pool = PoolModel(BLOCKS, SIZE, self.lookahead)
        self.held = FollowedPool(SIZE, BLOCKS)
        self.line = Line(self.held, self.tell)
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
            self.line.hear(*self.on_the_way.pop(0))

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
        self.line.catch_up()
        assert self.line.expected == len(self.line.published)
        if self.line.forgot:
            assert self.routers.held() <= self.pool.held()
        else:
            assert self.routers.held() == self.pool.held()
            self.check_matches()

    def check_matches(self) -> None:
        """The router predicts exactly the pool's own hit, or with lookahead at most a block more."""
        for root, tokens in self.prompts[-10:]:
            chain = hash_blocks(root, np.array(tokens, dtype=np.int32), SIZE)
            lora = next(lora for scope, lora in SCOPES if scope.root(b"k") == root)
            hit = len(self.pool.match(Request(root, lora, tokens), len(tokens)))
            found = self.held.count_held(chain, len(tokens))
            assert self.directory.match(chain).get("r", 0) == found * SIZE
            assert hit <= found <= hit + bool(self.lookahead)

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


class LookaheadMachine(PoolMachine):
    """A vLLM that drafts by EAGLE without a connector: a block has another name for each token that follows it."""

    lookahead = 1


TestLookahead = LookaheadMachine.TestCase
TestLookahead.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class FarMachine(PoolMachine):
    """A server that others use, too, and whose requests may ask for full reports: never too many blocks are known."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.line._pool = FollowedPool(SIZE, BLOCKS, far=True)
        self.checker = Checker(1_000_000)  # blocks that are told again are no copies
        self.doubled = False

    @rule(target=PoolMachine.running, scope=st.sampled_from(SCOPES), tokens=TOKENS, chunk=st.integers(1, 12))
    def begin(self, scope: tuple[PrefixScope, str | None], tokens: list[int], chunk: int) -> object:
        """With a full report before it; a block that is computed again though it is held is a second copy."""
        root = scope[0].root(b"k")
        self.pool.report(Request(root, scope[1], tokens))
        begun = super().begin(scope, tokens, chunk)
        self.doubled |= len(set(self.pool.content.values())) < len(self.pool.content)
        return begun

    @rule()
    def catch_up(self) -> None:
        self.step(lost=True)
        self.hear(len(self.on_the_way))
        self.line.catch_up()
        assert self.routers.held() <= self.pool.held()
        if not (self.line.forgot or self.doubled):
            assert self.routers.held() == self.pool.held()


TestFar = FarMachine.TestCase
TestFar.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


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


def told(pool: FollowedPool, *events: Any, rank: int | None = 0) -> list[Event]:
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
    assert told(FollowedPool(2, 8), stored(**changes), rank=None) == [BlocksStored(chain(1, 2))]


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
    pool = FollowedPool(2, 8)
    parent = stored(block_hashes=[b"0"], token_ids=[0, 0])
    assert told(pool, parent, stored(**changes), BlockRemoved([b"1"])) == [BlocksStored(chain(0, 0))]


def test_a_block_is_reported_while_all_its_ancestors_are_held() -> None:
    """A public parent may be removed first; when it returns, so do the private blocks after it that are still held."""
    pool, public, private = FollowedPool(2, 8), chain(1, 2), b"p" * 16
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
    pool = FollowedPool(2, 2)
    told(pool, STORED, stored(block_hashes=[b"2"], token_ids=[3, 4]))
    events = told(pool, stored(block_hashes=[b"3"], token_ids=[5, 6]))
    assert events == [CacheCleared(), BlocksStored(chain(5, 6))]
    assert len(pool) == 1


def test_events_that_routers_cannot_use_are_an_error_with_a_sentence() -> None:
    with pytest.raises(UnsupportedEvents, match="set block_size to 128"):
        told(FollowedPool(2, 8), stored(block_size=128, token_ids=[0] * 128))
    pool = FollowedPool(2, 8)
    assert told(pool, STORED, rank=1), "each data-parallel rank has an address of its own"
    with pytest.raises(UnsupportedEvents, match="data parallel ranks 1 and 0"):
        told(pool, STORED, rank=0)


@pytest.mark.parametrize("event", [stored(medium="CPU"), stored(token_ids=[1, 2, 3, 4])], ids=["offloaded", "left out"])
def test_blocks_that_cannot_be_placed_are_counted_and_nobodys(event: BlockStored) -> None:
    """Neither storing nor removing them changes the reports of other blocks."""
    pool = FollowedPool(2, 8)
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
    pool = FollowedPool(2, 20)
    assert told(pool, state(b"3"), LEADING) == [ends(1, 2, 3, 4, 5, 6)]
    assert [pool.count_held(PROMPT, most) for most in (3, 2)] == [3, 0]
    assert told(pool, state(b"2")) == [ends(1, 2, 3, 4)]
    assert [pool.count_held(PROMPT, most) for most in (3, 2, 1)] == [3, 2, 0]
    assert told(pool, state(b"3", group=2), BlockRemoved([b"2"], "GPU", 0)) == [
        CacheCleared(), ends(1, 2, 3, 4, 5, 6)
    ], "a group was unknown"  # fmt: skip
    assert told(pool, state(b"1"), state(b"1", group=2)) == [ends(1, 2)]
    assert told(pool, BlockRemoved([b"3"], "GPU", 1)) == [BlocksRemoved(PROMPT[-16:], ENDS_TIER)]
    assert pool.held_blocks == 6
    assert told(pool, AllBlocksCleared()) == [CacheCleared()]
    assert told(pool, LEADING) == [], "no state is known"


def test_nothing_is_reported_while_a_groups_rule_is_unknown() -> None:
    """Requests of such a model are routed by load."""
    pool = FollowedPool(2, 20)
    chunks = msgspec.structs.replace(LEADING, group_idx=2, kv_cache_spec_kind="chunked_local_attention")
    assert told(pool, LEADING) == [BlocksStored(PROMPT)]
    assert told(pool, chunks) == [CacheCleared()]
    assert (pool.count_held(PROMPT, 3), pool.unplaced, pool.held_blocks) == (0, 3, 3)


# Full attention, a window of so many tokens, or a state (0); the blocks of the routers that one of the group's covers.
Group = tuple[int | None, int]
GROUPS: dict[str, list[Group]] = {
    "full attention": [(None, 1)],
    "a window in every layer": [(7, 1)],
    "one window beside full attention, in two groups": [(7, 1), (None, 1), (7, 1)],
    "two windows": [(2, 1), (9, 1)],
    "two windows beside full attention": [(4, 1), (9, 1), (None, 1)],
    "states": [(0, 1), (None, 1)],
    "states beside windows": [(0, 1), (5, 1)],
    "states and windows beside full attention": [(0, 1), (5, 1), (None, 1)],
    "larger blocks in full attention": [(7, 1), (None, 2)],
    "larger blocks in a part of full attention": [(None, 1), (None, 2)],
    "larger blocks in windows": [(9, 2), (None, 1)],
    "a window within a block": [(1, 1), (None, 1)],
}
Steps = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans(), st.integers(0, 9)), max_size=50)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
@given(steps=Steps, together=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_reuse_follows_vllms_rule_over_its_groups(
    groups: list[Group], steps: list[tuple[int, bool, bool, int]], together: int
) -> None:
    """Two prompts differ after four blocks; each group removes and stores any block. Batches have several events."""
    pool, directory, mirror = FollowedPool(2, 90), Directory(2), Routers()
    directory.add_replica("r")
    tokens = {False: list(range(20)), True: [*range(8), *range(100, 112)]}
    names = {side: [b"%d" % ids[2 * i] for i in range(10)] for side, ids in tokens.items()}
    held: list[set[bytes]] = [set() for _ in groups]
    events: list[Any] = []

    def change(which: int, side: bool, at: int) -> None:
        scale = groups[which][1]
        name = names[side][at + scale - 1]
        gone = name in held[which]
        held[which] ^= {name}
        stored = _stored_event(which, groups[which], names[side], tokens[side], at)
        events.append(BlockRemoved([name], "GPU", which) if gone else stored)

    for which, (_, scale) in enumerate(groups):
        for side in (False, True):
            for at in range(4 * side, 10, scale):
                change(which, side, at)
    for number, (which, side, store, at) in enumerate(steps):
        which %= len(groups)
        scale = groups[which][1]
        placed = {b""}.union(*(mine for (window, _), mine in zip(groups, held, strict=True) if window != 0))
        found = [
            i for i in range(0, 10, scale)
            if store != (names[side][i + scale - 1] in held[which])
            and (not store or not i or names[side][i - 1] in placed)
        ]  # fmt: skip
        if found:
            change(which, side, found[at % len(found)])
        if number % together:
            continue
        changes = told(pool, *events)
        events.clear()
        directory.apply("r", changes)
        mirror(changes)
        for other, ids in tokens.items():
            hit = _vllm_hit(groups, names[other], held)
            assert pool.count_held(chain(*ids), 10) == hit
            assert directory.match(chain(*ids)).get("r", 0) == 2 * hit
        digest = CacheDigest((TierDigest(pool.tier, len(pool), pool.xor),))
        assert directory.drift("r", digest) is None
        assert mirror.mirror.holds(digest)
        assert pool.held_blocks == sum(map(len, held))
        assert pool.unplaced == 0


def _stored_event(index: int, group: Group, names: list[bytes], tokens: list[int], at: int) -> BlockStored:
    (window, scale), kind = group, "sliding_window"
    return BlockStored(
        [names[at + scale - 1]], names[at - 1] if at else None, tokens[2 * at : 2 * (at + scale)], 2 * scale, "GPU",
        None, [None if at else (ROOT.hex(),)], index,
        "full_attention" if window is None else kind if window else "mamba", window or None,
    )  # fmt: skip


def _vllm_hit(groups: list[Group], names: list[bytes], held: list[set[bytes]]) -> int:
    """Return the blocks hit. Source: ``HybridKVCacheCoordinator.find_longest_cache_hit`` and the groups' managers."""
    align, most = max(scale for _, scale in groups), len(names)
    while True:
        before = most
        for (window, scale), mine in zip(groups, held, strict=True):
            own = [names[i] in mine for i in range(scale - 1, most // scale * scale, scale)]
            if window is None:
                blocks = own.index(False) if False in own else len(own)
                most = blocks * scale // align * align
            elif window:
                most = _window_hit(own, -(-(window - 1) // (2 * scale)), align // scale) * scale
            else:
                most = max((i + 1 for i, one in enumerate(own) if one and not (i + 1) * scale % align), default=0)
        if most == before:
            return most


def _window_hit(held: list[bool], needed: int, align: int) -> int:
    """Source: ``SlidingWindowManager.find_longest_cache_hit``."""
    row = 0
    for index in reversed(range(len(held))):
        if not held[index]:
            row = 0
        elif row or not (index + 1) % align:
            row += 1
            if row >= needed:
                return index + row
    return row // align * align


def test_an_event_that_contradicts_itself_is_malformed() -> None:
    with pytest.raises(MalformedBatch):
        told(FollowedPool(2, 8), stored(extra_keys=[None, None]))
    for kind in ("sliding_window", "mamba"):
        with pytest.raises(MalformedBatch, match="blocks of 0 tokens"):
            told(FollowedPool(2, 8), stored(block_size=0, kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=8))


def test_ends_of_prompts_in_larger_blocks_are_no_hits() -> None:
    """vLLM names a prompt's end inside a block of another group's size: no group of whole blocks finds it."""
    pool = FollowedPool(2, 20)
    assert told(pool, stored(group_idx=1)) == [BlocksStored(chain(1, 2))], "the group's blocks are unknown so far"
    fine, keys = [b"1", b"2"], [(ROOT.hex(),), None]
    whole = stored(block_hashes=[b"2"], token_ids=[1, 2, 3, 4], block_size=4, group_idx=1)
    both = stored(block_hashes=fine, token_ids=[1, 2, 3, 4], extra_keys=keys)
    assert told(pool, both, BlockRemoved([b"1"], "GPU", 1), whole) == [CacheCleared(), ends(1, 2, 3, 4)]
    assert told(pool, stored(block_hashes=[b"3"], parent_block_hash=b"2", token_ids=[5, 6], group_idx=1)) == []
    assert pool.held_blocks == 3


@pytest.mark.parametrize(
    ("far", "origin", "removals"),
    [(False, None, 2), (True, None, 1), (False, "NEW", 2), (True, "NEW", 2), (False, "REUSED", 1), (True, "REUSED", 1)],
)
@pytest.mark.parametrize("kind", ["full_attention", "mamba"])
def test_blocks_that_are_told_again_are_no_further_copies(
    far: bool, origin: str | None, removals: int, kind: str
) -> None:
    """``kv_cache_report_mode=full`` tells of reused blocks from a chain's beginning, and newer versions mark them."""
    pool, names = FollowedPool(2, 8, far=far), [b"1", b"2"]
    event = stored(
        block_hashes=names, token_ids=[1, 2, 3, 4], extra_keys=[(ROOT.hex(),), None], origin=origin,
        kv_cache_spec_kind=kind,
    )  # fmt: skip
    told(pool, event, event)
    for _ in range(removals - 1):
        told(pool, BlockRemoved([*names]))
        assert pool.held_blocks == 2
    told(pool, BlockRemoved([*names]))
    assert pool.held_blocks == 0


def test_a_servers_names_cannot_be_bent() -> None:
    """A name stands for one prefix: else blocks could become each other's parents, which no walk over them ends."""
    pool = FollowedPool(2, 8, far=True)
    told(pool, STORED, stored(block_hashes=[b"2"], parent_block_hash=b"1", token_ids=[3, 4], extra_keys=None))
    for name, parent in ((b"1", b"2"), (b"2", None)):
        bent = stored(
            block_hashes=[name], parent_block_hash=parent, token_ids=[3, 4], group_idx=1,
            extra_keys=None if parent else [(ROOT.hex(),)],
        )  # fmt: skip
        with pytest.raises(MalformedBatch, match="stood for another prefix"):
            told(pool, bent)


def test_a_servers_groups_and_events_are_bounded() -> None:
    pool = FollowedPool(2, 8, far=True)
    with pytest.raises(UnsupportedEvents, match="more than 256 groups"):
        told(pool, *[stored(group_idx=group) for group in range(300)])
    assert len(pool._groups) <= 256
    with pytest.raises(MalformedBatch, match="9 blocks of a pool of 8"):
        told(FollowedPool(2, 8), stored(block_hashes=[b"x"] * 9, token_ids=[1] * 18, extra_keys=None))
    with pytest.raises(MalformedBatch):
        decode_batch(encode([stored(block_hashes=[b"x" * 65])]))
