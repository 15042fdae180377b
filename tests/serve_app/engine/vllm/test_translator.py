"""What the translator takes, counts and refuses; the law over whole histories is in ``test_translator_laws``."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from router.protocol.block_hash import hash_blocks
from router.protocol.events import BlocksRemoved, BlocksStored, CacheCleared, Event
from serve_app.engine.vllm.events.batches import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    MalformedBatch,
)
from serve_app.engine.vllm.events.translator import Translator, UnsupportedEvents

ROOT, OTHER = b"r" * 16, b"o" * 16
STORED = BlockStored(
    [b"1"], None, [1, 2], 2, extra_keys=[(ROOT.hex(),)], group_idx=0, kv_cache_spec_kind="full_attention"
)


def chain(*tokens: int, root: bytes = ROOT) -> bytes:
    return hash_blocks(root, np.array(tokens, dtype=np.int32), 2)


def told(translator: Translator, *events: Any, rank: int | None = 0) -> list[Event]:
    return translator.translate(KvEventBatch(1.0, events, rank))


def stored(**changes: Any) -> BlockStored:
    return msgspec.structs.replace(STORED, **changes)


def test_the_salt_of_a_first_block_is_the_root_and_children_hang_under_their_parent() -> None:
    translator = Translator(2, 8)
    child = stored(block_hashes=[b"2", b"3"], parent_block_hash=b"1", token_ids=[3, 4, 5, 6], extra_keys=[None, None])
    assert told(translator, STORED) == [BlocksStored(chain(1, 2))]
    assert told(translator, child) == [BlocksStored(chain(1, 2, 3, 4, 5, 6)[16:])]
    assert translator.known_blocks(chain(1, 2, 3, 4, 5, 6, 7, 8), 9) == 3
    assert translator.known_blocks(chain(1, 2, 3, 4), 1) == 1
    assert translator.known_blocks(chain(1, 2, root=OTHER), 1) == 0


def test_an_adapter_is_taken_off_the_extra_keys() -> None:
    named = stored(
        block_hashes=[b"1", b"2"],
        token_ids=[1, 2, 3, 4],
        lora_name="x@1",
        extra_keys=[("x@1", ROOT.hex()), ("x@1",)],
    )
    assert told(Translator(2, 8), named) == [BlocksStored(chain(1, 2, 3, 4))]


def test_an_adapter_whose_name_is_a_root_is_not_taken_for_one() -> None:
    named = stored(lora_name=OTHER.hex(), extra_keys=[(OTHER.hex(), ROOT.hex())])
    assert told(Translator(2, 8), named) == [BlocksStored(chain(1, 2))]
    unsalted = stored(lora_name=OTHER.hex(), extra_keys=[(OTHER.hex(),)])
    assert told(Translator(2, 8), unsalted) == []


@pytest.mark.parametrize(
    "keys",
    [
        None,
        [None],
        [()],
        [("short",)],
        [("g" * 32,)],
        [(ROOT.hex().upper().replace("7", "A"),)],
        [(ROOT.hex(), "image")],
        [(7,)],
    ],
)
def test_a_chain_without_a_root_of_ours_is_counted_and_nobodys(keys: Any) -> None:
    translator = Translator(2, 8)
    assert told(translator, stored(extra_keys=keys)) == []
    assert translator.counts.unsalted_blocks == 1


def test_blocks_of_images_are_nobodys_for_tokens_do_not_say_what_they_are() -> None:
    translator = Translator(2, 8)
    child = stored(block_hashes=[b"2"], parent_block_hash=b"1", token_ids=[3, 4], extra_keys=[(("image", 0),)])
    assert told(translator, STORED, child) == [BlocksStored(chain(1, 2))]
    assert translator.counts.unsalted_blocks == 1


def test_only_the_last_copy_that_goes_is_told() -> None:
    translator = Translator(2, 8)
    assert told(translator, STORED, STORED) == [BlocksStored(chain(1, 2))]
    assert told(translator, BlockRemoved([b"1"])) == []
    assert told(translator, BlockRemoved([b"1"])) == [BlocksRemoved(chain(1, 2))]
    assert told(translator, BlockRemoved([b"1"])) == []
    assert (translator.counts.duplicate_blocks, translator.counts.unknown_removals) == (1, 1)


def test_a_hash_that_comes_again_for_other_tokens_is_counted() -> None:
    translator = Translator(2, 8)
    told(translator, STORED, stored(token_ids=[9, 9]))
    assert translator.counts.collisions == 1


def test_orphans_and_unknown_events_are_counted() -> None:
    translator = Translator(2, 8)
    assert told(translator, stored(parent_block_hash=b"?", extra_keys=None)) == []
    batch = msgspec.structs.replace(KvEventBatch(1.0, ()), events=(AllBlocksCleared(), STORED))
    assert translator.translate(batch) == [CacheCleared(), BlocksStored(chain(1, 2))]
    assert (translator.counts.orphan_blocks, translator.counts.clears) == (1, 1)


def test_more_blocks_than_the_pool_has_mean_that_removals_were_lost() -> None:
    """Memory is bounded by the pool."""
    translator = Translator(2, 2)
    told(translator, STORED, stored(block_hashes=[b"2"], token_ids=[3, 4]))
    events = told(translator, stored(block_hashes=[b"3"], token_ids=[5, 6]))
    assert events == [CacheCleared(), BlocksStored(chain(5, 6))]
    assert (translator.num_blocks, translator.counts.restarts) == (1, 1)


def test_a_reset_is_told_once_and_what_is_of_before_it_is_not() -> None:
    translator = Translator(2, 8)
    told(translator, STORED)
    mark = translator.before_reset()
    assert translator.after_reset(mark) == [CacheCleared()]
    assert told(translator, stored(block_hashes=[b"2"], token_ids=[3, 4]), BlockRemoved([b"1"])) == []
    assert translator.counts.stale_blocks == 2
    assert told(translator, AllBlocksCleared(), STORED) == [CacheCleared(), BlocksStored(chain(1, 2))]


def test_a_reset_that_the_engine_told_first_takes_nothing_away() -> None:
    translator = Translator(2, 8)
    mark = translator.before_reset()
    told(translator, AllBlocksCleared(), STORED)
    assert translator.after_reset(mark) == []
    assert translator.num_blocks == 1


def test_after_a_loss_no_reset_is_waited_for() -> None:
    """Its event may be among what was lost."""
    translator = Translator(2, 8)
    translator.after_reset(translator.before_reset())
    assert translator.forget() == [CacheCleared()]
    assert told(translator, STORED) == [BlocksStored(chain(1, 2))]


@pytest.mark.parametrize("resets_before", [0, 1, 2])
def test_a_loss_while_a_reset_is_under_way_leaves_nothing_to_wait_for(resets_before: int) -> None:
    """Else all that comes later would count as of before the reset, and the replica look empty until another one."""
    translator = Translator(2, 8)
    for _ in range(resets_before):
        translator.after_reset(translator.before_reset())
    mark = translator.before_reset()
    translator.forget()
    translator.after_reset(mark)
    assert told(translator, STORED) == [BlocksStored(chain(1, 2))]
    assert translator.counts.stale_blocks == 0


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (stored(group_idx=1), "several groups of KV"),
        (BlockRemoved([b"1"], "GPU", 1), "several groups of KV"),
        (stored(medium="CPU"), "'CPU'.*offload"),
        (BlockRemoved([b"1"], "CPU"), "'CPU'.*offload"),
        (stored(kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=512), "sliding_window.*512"),
        (stored(kv_cache_spec_kind="mamba"), "'mamba'"),
        (stored(block_size=128, token_ids=[0] * 128), "set block_size to 128"),
        (stored(block_hashes=[b"1", b"2"]), "blocks were left out"),
    ],
)
def test_another_kind_of_cache_is_refused_with_a_sentence(event: Any, sentence: str) -> None:
    with pytest.raises(UnsupportedEvents, match=sentence):
        told(Translator(2, 8), event)


def test_other_data_parallel_ranks_are_refused() -> None:
    with pytest.raises(UnsupportedEvents, match="data parallel rank 1"):
        told(Translator(2, 8), STORED, rank=1)
    assert told(Translator(2, 8), STORED, rank=None)


def test_mla_is_taken() -> None:
    assert told(Translator(2, 8), stored(kv_cache_spec_kind="mla_attention"))


@pytest.mark.parametrize("event", [stored(token_ids=[1, 2**31]), stored(extra_keys=[None, None])])
def test_an_event_that_contradicts_itself_is_malformed(event: BlockStored) -> None:
    with pytest.raises(MalformedBatch):
        told(Translator(2, 8), event)
