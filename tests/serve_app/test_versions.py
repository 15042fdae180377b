"""Releases with one version of messages understand each other: fields are only appended, with defaults.

docs: upgrade
"""

import json
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from router.feed.sequencing import (
    FeedCounters,
    FeedMessage,
    FeedResequencer,
    SnapshotChunk,
    decode_chunk,
    decode_message,
    encode,
)
from router.protocol.block_hash import PrefixScope
from router.protocol.events import Event, LoadReport, TierDigest
from router.protocol.request import Decision
from router.protocol.version import UNTOLD, WIRE_VERSION, OtherVersion, mixes
from serve_app.cache.kv_chain import KvChain
from serve_app.cache.prefix.hot_prefixes import HashedTokens, HotPrefixes, SavedPrefix
from serve_app.checkpoints.adapter_registry import AdapterEntry
from serve_app.engine.protocol import (
    AdapterSpec,
    CacheRoom,
    EngineOutput,
    EngineRequest,
    FirstToken,
    Prefilled,
    ReplyTo,
    Save,
    SaveResult,
    request_of_wire,
    to_wire,
)
from serve_app.engine.sampling_params import SamplingParams, TokenLogprob, TokenRules
from serve_app.errors import LimitReason
from serve_app.fairness.levels import LevelAnswer, LevelQuestion
from serve_app.replica.peers import HotOffer, Survey, WantedPart

LAYOUTS = Path(__file__).with_name("layouts.json")
PACKED: tuple[type[Any], ...] = (
    *(FeedMessage, SnapshotChunk, TierDigest, Decision, EngineRequest, EngineOutput, ReplyTo),
    *(SamplingParams, TokenRules, Save, SaveResult, FirstToken, LimitReason),
    *get_args(Event),
)
"""Messages in msgpack and their parts, which tell a field by place or name. Readers ignore what they do not know."""
PICKLED: tuple[type[Any], ...] = (
    *(PrefixScope, AdapterSpec, AdapterEntry),
    *(WantedPart, HotOffer, Survey, CacheRoom, HotPrefixes, SavedPrefix, HashedTokens, KvChain),
    *(LevelQuestion, LevelAnswer, Prefilled, TokenLogprob),
)
"""What is sent by pickle, and tuples: a further field would be missing, or refused, at the other end."""


def layout(of: type[Any]) -> list[str]:
    """Return the names of a message's fields, in their order."""
    if is_dataclass(of):
        return [field.name for field in fields(of)]
    return list(getattr(of, "__struct_fields__", getattr(of, "_fields", ())))


def test_the_layouts_are_those_of_the_version() -> None:
    """Whoever changes one otherwise raises WIRE_VERSION, and writes the layouts again: ``python -m`` this module."""
    recorded = json.loads(LAYOUTS.read_text())
    assert recorded["version"] == WIRE_VERSION
    assert recorded["pickled"] == {of.__name__: layout(of) for of in PICKLED}
    assert list(recorded["packed"]) == [of.__name__ for of in PACKED]
    for of in PACKED:
        before = recorded["packed"][of.__name__]
        assert layout(of)[: len(before)] == before, f"{of.__name__}: append fields, or raise WIRE_VERSION"
        required = set(layout(of)[len(before) :]) & _required(of)
        assert not required, f"{of.__name__}: give new fields a default"


def _required(of: type[Any]) -> set[str]:
    if is_dataclass(of):
        given = (field for field in fields(of) if field.default is MISSING and field.default_factory is MISSING)
        return {field.name for field in given}
    return {field.name for field in msgspec.structs.fields(of) if field.required}


def test_a_message_with_more_fields_is_read_and_one_with_fewer_has_defaults() -> None:
    """So releases of one version mix, the older one on either side."""
    report = LoadReport(1, 2, 3, 4, 5, 6.0)
    for message, decode in (
        (FeedMessage(7, (report,)), decode_message),
        (SnapshotChunk(7, b"12345678", 0, True, (report,)), decode_chunk),
    ):
        plain = msgspec.msgpack.decode(encode(message))
        assert decode(msgspec.msgpack.encode([*plain, "of a later release"])) == message
        longer = [*plain]
        longer[longer.index([plain_report(report)])] = [[*plain_report(report), b"more"]]
        assert decode(msgspec.msgpack.encode(longer)) == message
    sent = to_wire(asked())
    plain = msgspec.msgpack.decode(sent)
    assert EngineRequest.__struct_fields__.index("version") == 42, "where every release looks for it"
    assert plain[42] == WIRE_VERSION
    read = request_of_wire(msgspec.msgpack.encode([*plain, {"of": "a later release"}]))
    assert to_wire(read) == sent


def plain_report(report: LoadReport) -> Any:
    return msgspec.msgpack.decode(encode(report))


@pytest.mark.parametrize("readable", [True, False])
def test_a_request_of_another_version_is_refused_with_the_remedy(readable: bool) -> None:
    """Whether or not its fields could be read; a damaged one of this version is no other release's."""
    fields_sent = msgspec.msgpack.decode(to_wire(asked()))
    at = EngineRequest.__struct_fields__.index("version")
    fields_sent[at] = WIRE_VERSION + 1
    if not readable:
        fields_sent[3] = {"another": "layout"}
    with pytest.raises(OtherVersion, match=r"upgrade\.md") as refused:
        request_of_wire(msgspec.msgpack.encode(fields_sent))
    assert refused.value.version == WIRE_VERSION + 1
    with pytest.raises(OtherVersion):
        request_of_wire(msgspec.msgpack.encode(["a shorter", "layout"]))
    fields_sent[at], fields_sent[3] = WIRE_VERSION, {"damaged": True}
    with pytest.raises(msgspec.ValidationError):
        request_of_wire(msgspec.msgpack.encode(fields_sent))


def test_a_feed_of_another_version_delivers_nothing_and_is_counted() -> None:
    delivered: list[Event] = []
    counters = FeedCounters()
    feed = FeedResequencer(delivered.extend, counters, Random(1), 0.0)
    nonce = feed.poll(100.0)
    assert nonce is not None
    report = LoadReport(1, 2, 3, 4, 5, 6.0)
    feed.on_chunk(encode(SnapshotChunk(1, nonce, 0, True, (report,), WIRE_VERSION + 1)), 100.0)
    feed.on_delta(encode(FeedMessage(1, (report,), WIRE_VERSION + 1)), 100.0)
    assert (delivered, counters.malformed, feed.live) == ([], 2, False)


def test_only_equal_versions_mix() -> None:
    assert mixes(WIRE_VERSION)
    assert not any(map(mixes, (UNTOLD, WIRE_VERSION + 1, WIRE_VERSION - 1)))


def asked() -> EngineRequest:
    scope = PrefixScope("m", "", b"salt")
    return EngineRequest(
        request_id="r",
        token_ids=np.arange(4, dtype=np.int32),
        scope=scope,
        root=b"k" * 16,
        sampling=SamplingParams(max_tokens=8),
    )


if __name__ == "__main__":
    told = {
        "version": WIRE_VERSION,
        "packed": {of.__name__: layout(of) for of in PACKED},
        "pickled": {of.__name__: layout(of) for of in PICKLED},
    }
    LAYOUTS.write_text(json.dumps(told, indent=1) + "\n")
