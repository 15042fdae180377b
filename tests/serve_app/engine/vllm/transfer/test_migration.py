"""What vLLM's engine says of a pool to peers that join or leave: by events of a model of that pool, without vLLM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import PrefixScope, extend_chain, split_chain
from serve_app.cache.prefix.hot_prefixes import SavedPrefix
from serve_app.cache.prefix.pins import Pins
from serve_app.engine.vllm.events.batches import decode_batch
from serve_app.engine.vllm.events.pool import VllmPool
from serve_app.engine.vllm.frontend import ModelFacts
from serve_app.engine.vllm.saves import block_number
from serve_app.engine.vllm.settings import VllmSettings
from serve_app.engine.vllm.transfer.migration import VllmMigration
from tests.serve_app.engine.tiny import root_of
from tests.serve_app.engine.vllm.pool_model import PoolModel, encode

SIZE, BLOCKS = 2, 12
SCOPES = [PrefixScope("m"), PrefixScope("m", salt=b"other"), PrefixScope("m", "x@1")]

Prompts = st.lists(
    st.tuples(st.sampled_from(SCOPES), st.lists(st.integers(0, 1), min_size=1, max_size=9), st.booleans()), max_size=14
)


class Pool:
    """A pool that evicts, and what is known of it; ``now_s`` is a second more with each prompt."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.model = PoolModel(BLOCKS, SIZE)
        self.held = VllmPool(SIZE, BLOCKS, self.clock)
        self.pins = Pins(BLOCKS)
        settings, facts = VllmSettings("m", block_size=SIZE), ModelFacts(2, 100, BLOCKS)
        self.migration = VllmMigration(settings, facts, self.held, self.pins, Path("/none"), lambda *_: 0, self.clock)

    def clock(self) -> float:
        return self.now_s

    def compute(self, scope: PrefixScope, tokens: list[int], *, owned: bool = True) -> None:
        self.now_s += 1
        root = root_of(scope)
        self.held.hit(extend_chain(root, 0, np.array(tokens, np.int32), SIZE), (len(tokens) - 1) // SIZE)
        if owned:
            self.migration.note_owner(root, scope, "t")
        begun = self.model.begin(root, scope.lora or None, list(tokens), len(tokens))
        assert begun is not None
        self.model.end(begun[0])
        self.held.translate(decode_batch(encode(self.model.take_events())))

    def held_by(self, *scopes: PrefixScope) -> set[bytes]:
        """Our hashes of what is held under these scopes' roots."""
        known = {entry.block_hash: entry.scope for entry in self.held.entries(self.migration._owners.get)}
        return {block_hash for block_hash in self.model.held() if known.get(block_hash) in scopes}


@given(Prompts)
def test_what_is_offered_is_what_is_held_and_parents_come_first(
    prompts: list[tuple[PrefixScope, list[int], bool]],
) -> None:
    """Each prefix with its own tokens under its own scope; nothing of an adapter, nor of a root that nobody knows."""
    pool, owned = Pool(), set()
    for scope, tokens, known in prompts:
        pool.compute(scope, tokens, owned=known)
        owned |= {scope} if known else set()
    hot = pool.migration.hot_prefixes()
    told = [block_hash for run in hot.runs for block_hash in split_chain(run.hashes)]
    assert len(told) == len(set(told))
    assert set(told) == pool.held_by(*owned & set(SCOPES[:2]))
    for number in range(len(hot.runs)):
        prefix = hot.prefix(number)
        assert prefix.chain == extend_chain(root_of(prefix.scope), 0, prefix.token_ids, SIZE)
        assert prefix.tenant == "t"
        parent = hot.runs[number].parent
        assert parent is None or parent < number


def test_what_is_used_goes_first() -> None:
    """A prefix that requests come back to is hotter than a later one that nobody does."""
    pool = Pool()
    pool.compute(SCOPES[0], [0, 0, 0, 0, 1])
    pool.compute(SCOPES[0], [0, 0, 0, 0, 0])
    pool.compute(SCOPES[0], [1, 1, 1, 1, 1])
    first, *others = pool.migration.hot_prefixes().runs
    assert first.token_ids == np.zeros(4, "<i4").tobytes()
    assert all(other.heat < first.heat for other in others)


def test_saves_go_first_and_stay_saves() -> None:
    """However little they are used; one that is not all held is none."""
    pool = Pool()
    pool.compute(SCOPES[0], [1, 1, 1, 1, 1])
    for _ in range(3):
        pool.compute(SCOPES[0], [0, 0, 0, 0, 0])
    chain = extend_chain(root_of(SCOPES[0]), 0, np.ones(4, np.int32), SIZE)
    pool.pins.add(b"k", [block_number(block_hash) for block_hash in split_chain(chain)], 60.0, pool.now_s - 40.0, "t")
    pool.pins.add(b"gone", [block_number(chain[:16]), 5], None, pool.now_s)
    hot = pool.migration.hot_prefixes()
    assert (hot.runs[0].kind, hot.runs[0].hashes) == ("save", chain)
    assert hot.saves == (SavedPrefix(b"k", "t", 60.0, 40.0, 0),)


def test_the_room_is_what_is_neither_used_nor_hotter() -> None:
    """Blocks in use hold no room; those that hold a prefix give way to a hotter one."""
    pool = Pool()
    assert pool.migration.cache_room(0).blocks_for(0.0) == BLOCKS
    pool.compute(SCOPES[0], [0] * 7)
    pool.compute(SCOPES[0], [0] * 7)
    pool.compute(SCOPES[2], [1] * 5)
    room = pool.migration.cache_room(0)
    assert room.free_blocks == BLOCKS - 5
    assert (room.blocks_for(0.0), room.blocks_for(1.5), room.blocks_for(9.0)) == (7, 9, 12)
    room = pool.migration.cache_room(9)
    assert (room.free_blocks, room.blocks_for(9.0)) == (0, 3)
    assert pool.migration.cache_room(12).blocks_for(9.0) == 0


def test_owners_are_remembered_within_bounds() -> None:
    """As many as the pool could hold beginnings of, the last to be asked for."""
    pool = Pool()
    for number in range(3 * BLOCKS):
        pool.migration.note_owner(bytes([number]), SCOPES[0], "t")
    assert list(pool.migration._owners) == [bytes([number]) for number in range(2 * BLOCKS, 3 * BLOCKS)]
