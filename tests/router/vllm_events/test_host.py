"""Blocks in an engine's host memory: reported as a tier below its pool, as far as vLLM's own look-up would reach."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from router.directory import Directory
from router.protocol.block_hash import hash_blocks, split_chain, xor_of_words
from router.protocol.events import HOST_TIER, BlocksRemoved, BlocksStored, CacheCleared, Event, TierDigest
from router.vllm_events.batches import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch
from router.vllm_events.pool import FollowedPool
from tests.router.vllm_events.pool_model import OTHER, ROOT, Routers

SIZE, DEPTH = 2, 6
PROMPTS = [
    (ROOT, [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]),
    (ROOT, [1, 1, 2, 2, 3, 3, 9, 9, 8, 8, 7, 7]),
    (OTHER, [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]),
]
CHAINS = [hash_blocks(root, np.array(ids, dtype=np.int32), SIZE) for root, ids in PROMPTS]
NAMES = [list(split_chain(chain)) for chain in CHAINS]


def told(pool: FollowedPool, *events: KvEvent) -> list[Event]:
    return pool.translate(KvEventBatch(1.0, list(events), 0))


def computed(prompt: int, first: int, end: int) -> BlockStored:
    root, ids = PROMPTS[prompt]
    keys: list[tuple[str] | None] = [None if index else (root.hex(),) for index in range(first, end)]
    names, parent = NAMES[prompt][first:end], NAMES[prompt][first - 1] if first else None
    tokens = ids[SIZE * first : SIZE * end]
    return BlockStored([*names], parent, tokens, SIZE, "GPU", None, [*keys], 0, "full_attention")


def copied(names: Sequence[bytes]) -> BlockStored:
    """Return vLLM's event for blocks copied to host memory: names, and nothing else."""
    return BlockStored([*names], None, [], 0, "CPU", group_idx=0)


def test_a_prompt_goes_on_from_the_pool_into_host_memory() -> None:
    """A block there counts behind those before it, and vLLM may report its copy after the pool has lost it."""
    pool, names = FollowedPool(SIZE, 8), NAMES[0]
    told(pool, computed(0, 0, 4))
    assert told(pool, copied(names[:3])) == [BlocksStored(b"".join(names[:3]), HOST_TIER)]
    assert told(pool, BlockRemoved(names[3:4], "GPU", 0), copied(names[3:4])) == [
        BlocksRemoved(names[3]),
        BlocksStored(names[3], HOST_TIER),
    ]
    (gone,) = told(pool, BlockRemoved([*names[2::-1]], "GPU", 0))
    assert isinstance(gone, BlocksRemoved) and set(split_chain(gone.hashes)) == {*names[:3]}
    assert (pool.count_held(CHAINS[0], 6), pool.host_blocks, pool.unplaced) == (4, 4, 0)
    assert pool.roots_of(CHAINS[0], 0) == ROOT
    assert told(pool, BlockRemoved(names[1:2], "CPU", 0)) == [BlocksRemoved(b"".join(names[3:0:-1]), HOST_TIER)]
    assert told(pool, computed(0, 0, 2)) == [
        BlocksStored(b"".join(names[:2])),
        BlocksStored(b"".join(names[2:4]), HOST_TIER),
    ]
    assert pool.count_held(CHAINS[0], 6) == 4
    assert told(pool, AllBlocksCleared()) == [CacheCleared()]
    assert pool.count_held(CHAINS[0], 6) == 0


def test_unknown_copies_and_other_media_are_counted_and_nobodys() -> None:
    pool = FollowedPool(SIZE, 8)
    told(pool, computed(0, 0, 1))
    assert told(pool, copied([b"?"]), BlockStored([NAMES[0][0]], None, [], 0, "STORAGE")) == []
    assert told(pool, BlockRemoved([b"?", NAMES[0][0]], "CPU", 0)) == []
    assert (pool.unplaced, pool.host_blocks) == (2, 0)


def test_a_copy_that_leaves_another_medium_stays_in_host_memory() -> None:
    """vLLM may keep a block's copies on a disk, too, and reports both by the block's name."""
    pool, names = FollowedPool(SIZE, 8), NAMES[0]
    told(pool, computed(0, 0, 2), copied(names[:2]), BlockStored([*names[:2]], None, [], 0, "STORAGE"))
    told(pool, BlockRemoved([*names[1::-1]], "GPU", 0))
    assert told(pool, BlockRemoved([*names[:2]], "STORAGE", 0)) == []
    assert pool.count_held(CHAINS[0], 6) == 2


def test_an_engine_that_never_removes_copies_fills_no_memory() -> None:
    """Those above the limit are unknown, and known once they are reported anew and others have left."""
    pool, names = FollowedPool(SIZE, 8, most_below=2), NAMES[0]
    told(pool, computed(0, 0, 3), copied(names[:3]))
    assert (pool.host_blocks, pool.unplaced) == (2, 1)
    told(pool, BlockRemoved([*names[1:2]], "CPU", 0), copied(names[2:3]), copied(names[1:2]))
    assert (pool.host_blocks, pool.unplaced) == (2, 2)


ACTIONS = st.lists(
    st.tuples(st.sampled_from("compute evict copy drop".split()), st.integers(0, 2), st.integers(0, DEPTH)), max_size=30
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS)
def test_routers_know_how_far_a_prompt_is_served(actions: list[tuple[str, int, int]]) -> None:
    """Against vLLM's rule: the pool's blocks from the beginning, then those in host memory, without a gap."""
    pool, routers, directory = FollowedPool(SIZE, 100), Routers(), Directory(SIZE)
    directory.add_replica("r")
    near, below = set[bytes](), set[bytes]()
    for action, prompt, index in actions:
        names = NAMES[prompt]
        if action == "compute":
            first = next((at for at in range(index) if names[at] not in near), index)
            if first == index:
                continue
            event: KvEvent = computed(prompt, first, index)
            near |= set(names[first:index])
        elif action == "evict":  # the end of a prompt first, as vLLM does
            gone = [name for name in names[: index - 1 if index else 0 : -1] if name in near]
            if any(set(other[index:]) & near - set(gone) and other[:index] == names[:index] for other in NAMES):
                continue
            event = BlockRemoved([*gone], "GPU", 0)
            near -= set(gone)
        elif action == "copy":
            event = copied([name for name in names[:index] if name in near and name not in below])
            below |= set(event.block_hashes)
        else:
            event = BlockRemoved([name for name in names[index : index + 1] if name in below], "CPU", 0)
            below -= set(event.block_hashes)
        events = told(pool, event)
        routers(events)
        directory.apply("r", events)
        for chain, blocks in zip(CHAINS, NAMES, strict=True):
            served = next((at for at, name in enumerate(blocks) if name not in near), DEPTH)
            served = next((at for at in range(served, DEPTH) if blocks[at] not in below), DEPTH)
            assert pool.count_held(chain, DEPTH) == served
            assert directory.match(chain).get("r", 0) == served * SIZE
    tiers = {name: packed for name, packed in routers.mirror.tiers().items() if packed}
    assert {digest.tier: digest for digest in pool.digest().tiers if digest.blocks} == {
        name: TierDigest(name, len(packed) // 16, xor_of_words(packed)) for name, packed in tiers.items()
    }
    again = Routers()
    again(pool.snapshot())
    assert {name: set(split_chain(packed)) for name, packed in again.mirror.tiers().items() if packed} == {
        name: set(split_chain(packed)) for name, packed in tiers.items()
    }
