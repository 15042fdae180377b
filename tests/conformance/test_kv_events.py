"""Recorded engines obey every law of KV events, and our pool follows them; each broken law is reported.

A recording is JSON lines: a head, then events in order: batches (base64 of the msgpack), resets, and requests that ran
alone, with their cached tokens.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from router.protocol.block_hash import hash_blocks
from router.vllm_events.batches import MalformedBatch, decode_batch
from router.vllm_events.pool import FollowedPool, UnsupportedEvents
from tests.conformance.kv_events.laws import BrokenLaw, Checker

RECORDED = sorted((Path(__file__).parent / "kv_events/recorded").glob("*.jsonl"))

Line = dict[str, Any]
Batch = list[Any]


def lines_of(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def replay(lines: list[Line]) -> Checker:
    """Feed a recording to the laws and our pool. Raises BrokenLaw, also for a request that hit other blocks."""
    head, *rest = lines
    size, checker = head["block_size"], Checker(head["num_blocks"])
    pool = FollowedPool(size, head["num_blocks"])
    for line in rest:
        if "payload" in line:
            payload = b64decode(line["payload"])
            checker.batch(line["number"], payload)
            pool.translate(decode_batch(payload))
        elif "request" in line:
            ids, cached = line["request"]["token_ids"], line["request"]["cached_tokens"]
            chain = hash_blocks(bytes.fromhex(line["request"]["root"]), np.array(ids, dtype=np.int32), size)
            predicted = size * pool.count_held(chain, (len(ids) - 1) // size)
            if predicted != cached:
                raise BrokenLaw(f"prediction: of {len(ids)} tokens {cached} were cached, and {predicted} by the events")
        else:
            pool.forget()
    return checker


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_engines_keep_every_law(path: Path) -> None:
    """Every request hits the announced blocks, after evictions, preemptions and a reset, and with an adapter."""
    lines = lines_of(path)
    checker = replay(lines)
    assert checker.duplicates
    assert checker.kinds.keys() == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert sum("request" in line for line in lines) > 50


def first(batches: list[Batch], kind: str, after: int = 0) -> dict[str, Any]:
    """Return the first event of a kind."""
    return next(event for batch in batches[after:] for event in batch[1] if event["type"] == kind)


def remove_parent(batches: list[Batch]) -> None:
    """Remove the parent of a block right after the block is stored."""
    batch = next(batch for batch in batches if any(event.get("parent_block_hash") for event in batch[1]))
    parent = next(event["parent_block_hash"] for event in batch[1] if event.get("parent_block_hash"))
    batch[1].append({"type": "BlockRemoved", "block_hashes": [parent], "medium": "GPU", "group_idx": 0})


def keep_everything(batches: list[Batch]) -> None:
    for batch in batches:
        batch[1] = [event for event in batch[1] if event["type"] != "BlockRemoved"]


def copy_of_first(batches: list[Batch]) -> dict[str, Any]:
    """Repeat the first stored event, for the caller to change."""
    event = deepcopy(first(batches, "BlockStored"))
    batches[1][1].insert(0, event)
    return event


BROKEN: list[tuple[str, Callable[[list[Batch]], object]]] = [
    ("not a batch", lambda batches: first(batches, "BlockStored").pop("token_ids")),
    ("not a batch", lambda batches: first(batches, "BlockRemoved").update(type="BlockGone")),
    ("blocks have 16 tokens", lambda batches: first(batches, "BlockStored", 5).update(block_size=16)),
    ("31 tokens for 1 blocks", lambda batches: first(batches, "BlockStored")["token_ids"].pop()),
    ("2 extra keys for 1", lambda batches: first(batches, "BlockStored")["extra_keys"].append(None)),
    ("parent", lambda batches: first(batches, "BlockStored").update(parent_block_hash=bytes(32))),
    ("removed", lambda batches: first(batches, "BlockRemoved")["block_hashes"].__setitem__(0, bytes(32))),
    ("no_holes", remove_parent),
    ("content", lambda batches: copy_of_first(batches)["token_ids"].__setitem__(0, 1)),
    ("content", lambda batches: copy_of_first(batches)["block_hashes"].__setitem__(0, bytes(32))),
    ("room", keep_everything),
    ("prediction", lambda batches: first(batches, "BlockStored").update(extra_keys=[["0" * 32]])),
]


@pytest.mark.parametrize(("law", "damage"), BROKEN, ids=[law for law, _ in BROKEN])
def test_a_stream_that_breaks_a_law_is_reported(law: str, damage: Callable[[list[Batch]], object]) -> None:
    """Each case changes one thing in a real engine's events."""
    lines = lines_of(RECORDED[0])
    sent = [line for line in lines if "payload" in line]
    batches = [msgspec.msgpack.decode(b64decode(line["payload"])) for line in sent]
    damage(batches)
    for line, batch in zip(sent, batches, strict=True):
        line["payload"] = b64encode(msgspec.msgpack.encode(batch)).decode()
    with pytest.raises((BrokenLaw, MalformedBatch, UnsupportedEvents), match=law):
        replay(lines)


def test_a_batch_that_is_missing_is_told() -> None:
    with pytest.raises(BrokenLaw, match="numbers, batch 19: 21 after 20 batches"):
        replay([line for line in lines_of(RECORDED[0]) if line.get("number") != 20 and "request" not in line])
