"""A database that an earlier release has made, or uses beside a new one: nothing of either is lost to the other."""

import asyncio
import random
import sqlite3
from dataclasses import replace
from pathlib import Path
from secrets import token_bytes

import pytest

from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.stored.database import RESPONSES, ObjectPlace, StorageLimits
from serve_app.stored.responses import ResponseRows, StoredResponses
from serve_app.stored.url import open_database
from tests.harness.virtual_time import Clock
from tests.serve_app.stored.earlier import EarlierRedis, EarlierSql, earlier

NOW_S = 1_800_000_000.0


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW_S)


@pytest.fixture
def limits(clock: Clock) -> StorageLimits:
    return StorageLimits(50, 1000, clock)


@pytest.fixture
def old(url: str | None, tmp_path: Path, limits: StorageLimits) -> EarlierSql | EarlierRedis:
    return earlier(url, tmp_path / "responses.sqlite", limits)


@pytest.fixture
def new(old: object, url: str | None, tmp_path: Path, limits: StorageLimits) -> ResponseRows:
    """Opened after the earlier release has made its tables."""
    return ResponseRows(open_database(url, tmp_path / "responses.sqlite", limits), limits)


def test_an_earlier_response_is_read_counted_and_deleted(
    url: str | None, old: EarlierSql | EarlierRedis, new: ResponseRows, tmp_path: Path, limits: StorageLimits
) -> None:
    owner, names = token_bytes(32), [token_bytes(32) for _ in range(3)]
    database = open_database(url, tmp_path / "responses.sqlite", limits)
    for number, name in enumerate(names):
        old.put(owner, name, b"%d" % number * 200)
    assert [new.get(owner, name) for name in names] == [b"%d" % number * 200 for number in range(3)]
    assert database.taken(ObjectPlace(owner, RESPONSES)) == 600
    assert new.delete(owner, names[1]) and not new.delete(owner, names[1])
    assert old.get(owner, names[1]) is None
    assert database.taken(ObjectPlace(owner, RESPONSES)) == 400


def test_the_bound_and_the_end_are_of_both(old: EarlierSql | EarlierRedis, new: ResponseRows, clock: Clock) -> None:
    """The oldest leave, whoever stored them, and each release removes what is over."""
    owner, names = token_bytes(32), [token_bytes(32) for _ in range(5)]

    def left() -> list[bool]:
        assert [old.get(owner, name) for name in names] == [new.get(owner, name) for name in names]
        return [new.get(owner, name) is not None for name in names]

    for name, one in zip(names[:4], (old, new, old, new), strict=True):
        one.put(owner, name, b"x" * 400)
        clock.now_s += 1
    assert left() == [False, False, True, True, False]
    old.put(owner, names[4], b"x" * 400)
    assert left() == [False, False, False, True, True]
    clock.now_s += 49.5  # the end of what the new one stored, not of the last
    old.put(owner, names[0], b"x" * 100)
    assert left() == [True, False, False, False, True]
    clock.now_s += 3
    new.put(owner, names[1], b"x" * 100)
    assert left() == [True, True, False, False, False]


@pytest.mark.parametrize("seed", range(3))
def test_old_and_new_processes_beside_each_other_lose_nothing(
    seed: int, url: str | None, tmp_path: Path, limits: StorageLimits
) -> None:
    """In any order the model is a dictionary, which both read after each call."""
    rng, limits = random.Random(seed), replace(limits, max_bytes=1 << 20)
    file = tmp_path / "responses.sqlite"
    owners, names = [token_bytes(32) for _ in range(2)], [token_bytes(32) for _ in range(4)]
    one_of_each = earlier(url, file, limits), ResponseRows(open_database(url, file, limits), limits)
    both: list[EarlierSql | EarlierRedis | ResponseRows] = list(one_of_each)
    stored: dict[tuple[bytes, bytes], bytes] = {}
    for _ in range(60):
        owner = rng.choice(owners)
        name = bytes(a ^ b for a, b in zip(owner, rng.choice(names), strict=True))  # as real ones, of one owner alone
        one = rng.choice(both)
        if rng.random() < 0.4:
            assert one.delete(owner, name) == (stored.pop((owner, name), None) is not None)
        else:
            data = rng.randbytes(40)
            one.put(owner, name, data)
            stored.setdefault((owner, name), data)
        for each in both:
            assert each.get(owner, name) == stored.get((owner, name))
    for (owner, name), data in stored.items():
        assert [each.get(owner, name) for each in both] == [data] * 2


def test_a_response_of_an_earlier_release_opens(tmp_path: Path) -> None:
    """Its names, and its text's key, are what that release derived from the secret."""
    row = (
        bytes.fromhex("1789c968a834518034097712462a147cc36354708975acad46864d61b102053b"),
        bytes.fromhex("39a33e70d05751959fda51e063f102db09bbbffa0a73f341d16d41b7ce63e41b"),
        NOW_S,
        116,
        bytes.fromhex(
            "6e6e6e6e6e6e6e6e6e6e6e6e1f1586acd54ccb8ead694f778883f4c0ea357245c3c2e7a54a9057da6b2470c1d290434ce7e8a638"
            "ae9fbb4cca17e956764267cbfd2578aacc6730cc004afb213971db71fa2c4a761493c623f0542a4311708af354e9139d7acfbdd1"
            "82c3e131b588574859cffc12"
        ),
    )
    limits = StorageLimits(3600, 1 << 20, lambda: NOW_S)
    earlier(None, tmp_path / "f", limits)
    with sqlite3.connect(tmp_path / "f") as database:
        database.execute("INSERT INTO sealed_responses VALUES (?, ?, ?, ?, ?)", row)
    database.close()
    stored = StoredResponses(open_database(None, tmp_path / "f", limits), b"s" * 32, FairWorkers(Shares({})), limits)
    document, _ = asyncio.run(stored.get("acme", "resp_1")) or (None, 0)
    assert document is not None and document.input == [{"id": "msg_1", "content": "hi"}]
    assert asyncio.run(stored.delete("acme", "resp_1"))
