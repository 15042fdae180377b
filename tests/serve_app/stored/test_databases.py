"""No tenant reads another's response, nor anyone with the database alone; bounds and kills; a URL is never quoted."""

import asyncio
import json
import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from secrets import token_bytes
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.cli.checks.settings import unreachable
from serve_app.errors import Overloaded, RequestTooLarge, ResponseDamaged
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.stored.database import RESPONSES, Database, ObjectPlace, StorageLimits, StoreError
from serve_app.stored.objects import StoredObjects
from serve_app.stored.responses import Document, ResponseRows, StoredResponses
from serve_app.stored.sqlite import open_file
from serve_app.stored.url import open_database
from tests.harness.virtual_time import Clock
from tests.serve_app.stored.conftest import SERVERS

NOW_S = 1_800_000_000.0
Open = Callable[[], Database]
OpenRows = Callable[[], ResponseRows]


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW_S)


@pytest.fixture
def limits(clock: Clock) -> StorageLimits:
    """1,000 bytes per tenant, for 50 s."""
    return StorageLimits(50, 1000, clock)


@pytest.fixture
def opened(url: str | None, tmp_path: Path, limits: StorageLimits) -> Open:
    """Opens the same database again and again."""
    return lambda: open_database(url, tmp_path / "responses.sqlite", limits)


@pytest.fixture
def backend(opened: Open) -> Iterator[Database]:
    yield opened()


@pytest.fixture
def opened_rows(opened: Open, limits: StorageLimits) -> OpenRows:
    """As of several ingresses, each with its connection."""
    return lambda: ResponseRows(opened(), limits)


@pytest.fixture
def rows(opened_rows: OpenRows) -> ResponseRows:
    return opened_rows()


def test_a_database_that_answers_is_reachable(url: str | None) -> None:
    assert url is None or unreachable(url) == ""


def test_stored_data_stays_for_its_tenant_until_deleted(rows: ResponseRows, opened_rows: OpenRows) -> None:
    """It is visible through another connection too, and a repeated call stores it once."""
    one, other, key = token_bytes(32), token_bytes(32), token_bytes(32)
    for _ in range(2):
        rows.put(one, key, b"data\0\xff")
    assert opened_rows().get(one, key) == b"data\0\xff"
    assert rows.get(other, key) is None
    assert not rows.delete(other, key)
    assert rows.get(one, key) is not None
    assert rows.delete(one, key)
    assert rows.get(one, key) is None
    assert not rows.delete(one, key)


def test_a_tenant_has_so_many_bytes_and_its_oldest_leave(rows: ResponseRows, clock: Clock) -> None:
    """Deleted ones free their space, a repeated call takes none, and another tenant's are not touched."""
    tenant, other = token_bytes(32), token_bytes(32)
    rows.put(other, kept := token_bytes(32), b"x" * 900)
    keys = [token_bytes(32) for _ in range(5)]
    for key in keys[:2]:
        clock.now_s += 1
        for _ in range(3):
            rows.put(tenant, key, b"x" * 400)
    assert rows.delete(tenant, keys[0])
    for key in keys[2:4]:
        clock.now_s += 1
        rows.put(tenant, key, b"x" * 300)
    assert [rows.get(tenant, key) is not None for key in keys] == [False, True, True, True, False]
    clock.now_s += 1
    rows.put(tenant, keys[4], b"x" * 600)
    assert [rows.get(tenant, key) is not None for key in keys] == [False, False, False, True, True]
    assert rows.get(other, kept) is not None


def test_the_newest_stays_with_any_clocks(rows: ResponseRows, clock: Clock) -> None:
    """An ingress with a slow clock loses no response that it has just acknowledged."""
    tenant, first, late = token_bytes(32), token_bytes(32), token_bytes(32)
    rows.put(tenant, first, b"x" * 600)
    clock.now_s -= 10
    rows.put(tenant, late, b"x" * 600)
    assert rows.get(tenant, late) is not None


def test_expired_data_is_deleted(rows: ResponseRows, clock: Clock) -> None:
    """The tenant's next write deletes it."""
    tenant, keys = token_bytes(32), [token_bytes(32) for _ in range(3)]
    rows.put(tenant, keys[0], b"x")
    clock.now_s += 51
    rows.put(tenant, keys[1], b"x")
    assert [rows.get(tenant, key) is not None for key in keys] == [False, True, False]


def test_sql_forgets_tenants_that_store_no_more(tmp_path: Path, clock: Clock, limits: StorageLimits) -> None:
    """Any tenant's next write deletes their data."""
    rows = ResponseRows(open_database(None, tmp_path / "responses.sqlite", limits), limits)
    tenant, key = token_bytes(32), token_bytes(32)
    rows.put(tenant, key, b"x")
    clock.now_s += 51
    rows.put(token_bytes(32), token_bytes(32), b"x")
    assert rows.get(tenant, key) is None


def test_writers_at_once_lose_nothing_and_keep_the_bound(opened_rows: OpenRows, clock: Clock) -> None:
    """Several connections, as of several ingresses, write to one tenant: all is stored, later as much as fits."""
    tenant, keys = token_bytes(32), [token_bytes(32) for _ in range(40)]
    ingresses = [opened_rows() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: ingresses[number % 4].put(tenant, keys[number], b"x" * 25), range(40)))
        assert all(ingresses[0].get(tenant, key) for key in keys)
        list(threads.map(lambda number: ingresses[number % 4].put(tenant, token_bytes(32), b"x" * 500), range(8)))
        list(threads.map(lambda number: ingresses[number % 4].delete(tenant, keys[number]), range(40)))
        clock.now_s += 1
        ingresses[0].put(tenant, keys[0], b"x" * 400)
        ingresses[1].put(tenant, keys[1], b"x" * 400)
    assert ingresses[2].get(tenant, keys[0]) and ingresses[3].get(tenant, keys[1])


def test_objects_are_new_once_and_of_one_owner_and_kind(backend: Database, opened: Open, clock: Clock) -> None:
    """Of many writers of one object one wins; lists, sums and removals are of a kind; what expires is gone."""
    owner, other, kinds = token_bytes(32), token_bytes(32), [token_bytes(32) for _ in range(2)]
    later = clock.now_s + 40
    places = [ObjectPlace(owner, kind, token_bytes(32)) for kind in kinds for _ in range(2)]
    stranger = ObjectPlace(other, kinds[0], token_bytes(32))
    for place in (*places, stranger):
        assert backend.insert(place, b"x" * 10, later)
        assert not opened().insert(place, b"y" * 99, later)
    assert (
        backend.taken(ObjectPlace(owner, b"")),
        backend.taken(ObjectPlace(other, b"")),
        backend.taken(ObjectPlace(token_bytes(32), b"")),
    ) == (40, 10, 0)
    assert sorted(backend.ids(places[0])) == sorted(place.id for place in places[:2])
    assert backend.swap(places[0], b"x" * 10, b"z")
    assert not backend.swap(places[0], b"x" * 10, b"y")
    assert dict(backend.read(places[0])) == {places[0].id: b"z", places[1].id: b"x" * 10}
    assert (backend.find(places[0]), backend.find(stranger)) == (b"z", b"x" * 10)
    assert backend.remove(places[0]) and not backend.remove(places[0])
    assert backend.remove(ObjectPlace(owner, kinds[1]))
    assert (backend.taken(ObjectPlace(owner, b"")), backend.find(places[2])) == (10, None)
    assert backend.find(places[1]) is not None


@pytest.mark.parametrize("kind", [token_bytes(32), RESPONSES], ids=["any", "responses"])
def test_a_kind_does_what_every_kind_does(backend: Database, clock: Clock, kind: bytes) -> None:
    """Also responses, which each database may keep elsewhere: stored once, changed, listed, counted and dropped."""
    owner, later = token_bytes(32), clock.now_s + 40
    places = [ObjectPlace(owner, kind, token_bytes(32)) for _ in range(4)]
    every = ObjectPlace(owner, kind)
    for number, place in enumerate(places):
        assert backend.insert(place, b"x" * 100, later + number)
        assert not backend.insert(place, b"y", later)
    assert not backend.insert(places[0]._replace(id=token_bytes(32)), b"x" * 100, later, 499)
    stranger = ObjectPlace(token_bytes(32), kind, places[0].id)
    assert backend.find(stranger) is None and not backend.remove(stranger) and backend.ids(stranger) == []
    assert backend.swap(places[0], b"x" * 100, b"z" * 50) and not backend.swap(places[0], b"x" * 100, b"y")
    assert sorted(backend.ids(every)) == sorted(place.id for place in places)
    data = {place.id: b"z" * 50 if place is places[0] else b"x" * 100 for place in places}
    assert dict(backend.read(every)) == data
    assert backend.taken(every) == backend.taken(ObjectPlace(owner, kind)) == 350
    backend.expire(places[0], later + 9)
    assert backend.evict(places[1], 250) == 1
    assert [backend.find(place) is not None for place in places] == [True, True, False, True]
    assert backend.evict(every, 0) == 3 and backend.evict(every, 0) == 0
    assert (backend.taken(every), backend.ids(every)) == (0, [])
    for place in places[:2]:
        assert backend.insert(place, b"x", later)
    backend.expire(every, later + 9)
    assert backend.remove(every) and not backend.remove(every)
    assert backend.find(places[0]) is None


def test_objects_expire(url: str | None, tmp_path: Path) -> None:
    """By real time, as Redis counts; a database in SQL removes them at another's next write."""
    backend = open_database(url, tmp_path / "f", StorageLimits(50, 1000))
    owner, kind = token_bytes(32), token_bytes(32)
    short, long = (ObjectPlace(owner, kind, token_bytes(32)) for _ in range(2))
    backend.insert(short, b"x", time.time() + 0.3)
    backend.insert(long, b"x", time.time() + 60)
    assert backend.swap(short, b"x", b"yy")
    assert backend.taken(ObjectPlace(owner, b"")) == 3
    time.sleep(0.4)
    assert (backend.find(short), backend.ids(long), backend.read(long)) == (None, [long.id], [(long.id, b"x")])
    assert backend.taken(ObjectPlace(owner, b"")) == 1
    assert backend.insert(short._replace(id=token_bytes(32)), b"x", time.time() + 60)
    assert backend.taken(ObjectPlace(owner, b"")) == 2


def test_what_a_tenant_has_is_summed_without_its_data(tmp_path: Path) -> None:
    """An upload asks for the sum with each of its chunks, beside 50,000 lines of a batch."""
    backend = open_file(tmp_path / "f", StorageLimits(50, 1000))
    with sqlite3.connect(tmp_path / "f") as database:
        for table, sql in (("sealed_objects", backend.objects), ("sealed_responses", backend.responses)):
            for statement in (sql.taken, sql.insert_within) if sql is backend.objects else (sql.taken_of_kind,):
                plan = database.execute(f"EXPLAIN QUERY PLAN {statement}", [0] * statement.count("?")).fetchall()
                lines = [row[3] for row in plan if table in row[3]]
                assert lines and all("COVERING INDEX" in line for line in lines), lines


@pytest.mark.parametrize("most", [39, 40])
def test_a_bounded_object_has_room_or_is_not_there(backend: Database, clock: Clock, most: int) -> None:
    """With all of its owner's, of any kind, that have not ended; others' do not count."""
    owner, later = token_bytes(32), clock.now_s + 40
    assert backend.insert(ObjectPlace(owner, token_bytes(32), token_bytes(32)), b"x" * 10, later)
    assert backend.insert(ObjectPlace(owner, token_bytes(32), token_bytes(32)), b"x" * 10, later)
    assert backend.insert(ObjectPlace(token_bytes(32), token_bytes(32), token_bytes(32)), b"x" * 90, later)
    last = ObjectPlace(owner, token_bytes(32), token_bytes(32))
    assert backend.insert(last, b"y" * 20, later, most) == (most == 40)
    assert backend.find(last) == (b"y" * 20 if most == 40 else None)
    assert backend.taken(ObjectPlace(owner, b"")) == (40 if most == 40 else 20)
    if most == 40:
        assert not backend.insert(last._replace(id=token_bytes(32)), b"y", later, most)
        assert backend.remove(last) and backend.insert(last, b"y" * 20, later, most)


def test_a_file_is_private_and_an_impossible_one_is_named(tmp_path: Path) -> None:
    """SQLite's files next to it are private too, under any umask. (docs: isolation)"""
    file, before = tmp_path / "made" / "responses.sqlite", os.umask(0)
    try:
        backend = open_database(None, file, StorageLimits(50, 1000))
        backend.insert(ObjectPlace(b"t", b"k", b"i"), b"x", time.time() + 50)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in file.parent.iterdir()} == {
        f"responses.sqlite{end}": 0o600 for end in ("", "-wal", "-shm")
    }
    with pytest.raises(StoreError, match="responses_file"):
        open_database(None, Path("/proc/nowhere/responses.sqlite"), StorageLimits(50, 1000))


@pytest.mark.parametrize(
    "url",
    ["mysql://u:hunter2@h/d", "redis://u:hunter2/2@h", "hunter2", "postgresql://u:hunter2#@h/d", "redis://[hunter2"],
)
def test_a_url_that_names_no_database_is_not_quoted(url: str, tmp_path: Path) -> None:
    """It may contain a password, and errors are logged. (docs: isolation)"""
    with pytest.raises(StoreError) as caught:
        open_database(url, tmp_path / "f", StorageLimits(50, 1000))
    assert "postgresql://HOST" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("scheme", "module"), [("rediss", "redis"), ("postgresql", "psycopg")])
def test_a_client_library_that_is_missing_is_named(
    scheme: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StoreError, match=rf"pip install '\.\[{'redis' if module == 'redis' else 'postgres'}\]'"):
        open_database(f"{scheme}://user:password@127.0.0.1:1/x", tmp_path / "f", StorageLimits(50, 1000))


@pytest.mark.parametrize("kind", SERVERS)
def test_a_server_that_comes_back_is_used_again(kind: str, tmp_path: Path) -> None:
    """A server crash keeps acknowledged data; meanwhile there are errors, but no broken connection remains."""
    with SERVERS[kind]() as server:
        limits = StorageLimits(3600, 1 << 20)
        backend = open_database(server.url, tmp_path / "f", limits)
        rows = ResponseRows(backend, limits)
        stored: list[bytes] = []
        for _ in range(3):
            for _ in range(5):
                stored.append(token_bytes(32))
                rows.put(b"t" * 32, stored[-1], token_bytes(2000))
            server.kill()
            with pytest.raises(backend.failures):
                while True:  # a connection's process may outlive its Postgres for a moment
                    rows.get(b"t" * 32, stored[0])
            server.start()
            assert all(rows.get(b"t" * 32, key) for key in stored)


KILLS = 200


def test_two_hundred_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Two writers share a file, as two ingresses do; stored responses stay, deleted ones stay deleted.

    docs: failures
    """
    command = [sys.executable, "-m", "tests.serve_app.stored.kills", str(tmp_path / "responses.sqlite"), str(KILLS)]
    counts = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=250).stdout)
    assert counts["kills"] == KILLS
    assert counts["stored"] >= KILLS // 2  # each round waits for at least one
    assert counts["deleted"] > 0
    assert counts["lost"] == 0


SECRET = b"s" * 32
BOUNDS = StorageLimits(3600, 1 << 20)

TENANTS = st.sampled_from(["acme", "acm", "acme.x", "default"])
IDS = st.sampled_from(["resp_1", "resp_2", "e\0resp_1", "x\0resp_1", ""]) | st.text(max_size=8)
CALLS = st.lists(st.tuples(st.sampled_from(["put", "get", "delete"]), TENANTS, IDS), max_size=12)


def document(response_id: str, text: str = "", created_s: float | None = None) -> Document:
    created_s = time.time() if created_s is None else created_s
    return Document([{"id": "msg_1", "content": text}], {"id": response_id, "created_at": created_s, "output": []})


def with_stored(
    file: Path,
    work: Callable[[StoredResponses], Awaitable[Any]],
    secret: bytes = SECRET,
    bounds: StorageLimits = BOUNDS,
) -> Any:
    """Return the result of ``work`` with the responses of a file."""

    async def run() -> Any:
        return await work(StoredResponses(open_database(None, file, bounds), secret, FairWorkers(Shares({})), bounds))

    return asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(CALLS)
def test_each_tenant_has_its_own_responses_and_no_others(calls: list[tuple[str, str, str]]) -> None:
    """For any ids, even equal ones, the model is a dictionary by tenant and id. (docs: isolation)"""

    async def compared(stored: StoredResponses) -> None:
        expected: dict[tuple[str, str], str] = {}
        for number, (kind, tenant, response_id) in enumerate(calls):
            there = (tenant, response_id) in expected
            if kind == "delete":
                assert await stored.delete(tenant, response_id) == there
                expected.pop((tenant, response_id), None)
            elif kind == "put" and not there:
                expected[tenant, response_id] = f"of {tenant}, {number}"
                await stored.put(tenant, document(response_id, expected[tenant, response_id]))
            for other in ("acme", "acm", "acme.x", "default"):
                found = await stored.get(other, response_id)
                text = None if found is None else found[0].input[0]["content"]
                assert text == expected.get((other, response_id))

    with tempfile.TemporaryDirectory() as directory:
        with_stored(Path(directory) / "responses.sqlite", compared)


def test_the_database_alone_tells_nothing(tmp_path: Path) -> None:
    """Neither text, tenant nor id is in the file; with another secret nothing is found. (docs: isolation)"""
    file, words = tmp_path / "responses.sqlite", "Where does the ship lie tonight, and when does it sail?"
    with_stored(file, lambda stored: stored.put("acme-shipping", document("resp_0123456789", words)))
    raw = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert len(raw) > 1000
    for told in (words, "acme-shipping", "resp_0123456789"):
        assert told.encode() not in raw
    found = with_stored(file, lambda stored: stored.get("acme-shipping", "resp_0123456789"))
    assert found[0].input[0]["content"] == words
    assert with_stored(file, lambda stored: stored.get("acme-shipping", "resp_0123456789"), b"t" * 32) is None


@pytest.mark.parametrize("change", ["another row's data", "a flipped bit"])
@pytest.mark.parametrize("second_place", [("globex", "resp_2"), ("globex", "resp_1"), ("acme", "resp_2")], ids=str)
def test_a_row_that_was_tampered_with_is_no_response(
    change: str, second_place: tuple[str, str], tmp_path: Path
) -> None:
    """Data belong to one tenant and id: a row with another's data is refused, though its key is right.

    The other one may be of the same tenant: each text has its own key. (docs: isolation)
    """
    file = tmp_path / "responses.sqlite"
    with_stored(file, lambda stored: stored.put("acme", document("resp_1", "ours")))
    with_stored(file, lambda stored: stored.put(second_place[0], document(second_place[1], "theirs")))
    with sqlite3.connect(file) as database:
        rows = dict(database.execute("SELECT id, data FROM sealed_responses").fetchall())
        (first, one), (second, other) = rows.items()
        one = other if change == "another row's data" else bytes([one[0] ^ 1]) + one[1:]
        for key, data in ((first, one), (second, one)):
            database.execute("UPDATE sealed_responses SET data = ? WHERE id = ?", (data, key))
    database.close()
    refused = 0
    for tenant, response_id in (("acme", "resp_1"), second_place):
        try:
            with_stored(file, lambda stored, of=(tenant, response_id): stored.get(*of))
        except ResponseDamaged as error:
            assert (error.status, error.code) == (404, "response_damaged") and "delete it" in error.message
            refused += 1
    assert refused == (1 if change == "another row's data" else 2)


def test_a_file_that_is_damaged_says_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The client is not told to try again, and the log names the file and the remedy, as a refused start does."""
    file = tmp_path / "responses.sqlite"

    def overwrite() -> None:
        for path in tmp_path.iterdir():
            path.write_bytes(b"no database at all, " * 1000)

    async def damaged(stored: StoredResponses) -> None:
        await stored.put("acme", document("resp_1", "ours"))
        overwrite()
        with pytest.raises(Overloaded, match="store: false until") as refused:
            await stored.get("acme", "resp_1")
        assert (refused.value.code, refused.value.retry_after_s) == ("response_store_damaged", None)
        assert f"{file} is damaged" in caplog.text

    with_stored(file, damaged)
    with pytest.raises(StoreError, match="name another responses_file"):
        open_database(None, file, StorageLimits(50, 1000))


def test_a_response_is_there_for_its_time_even_if_nothing_removes_it(tmp_path: Path) -> None:
    now = [1000.0]
    bounds = StorageLimits(50, 1 << 20, lambda: now[0])

    async def work(stored: StoredResponses) -> None:
        await stored.put("acme", document("resp_1", created_s=now[0]))
        now[0] += 50
        assert await stored.get("acme", "resp_1") is not None
        now[0] += 1
        assert await stored.get("acme", "resp_1") is None

    with_stored(tmp_path / "responses.sqlite", work, bounds=bounds)


TIMES = (-1000.0, -1.0, 0.0, 0.5, 1.0, 2.0, 1000.0)


@settings(max_examples=20)
@given(st.permutations(TIMES))
def test_what_is_stored_lives_by_the_clock_wherever_it_goes(times: list[float]) -> None:
    """In any order, without a write that removes what is over: responses, files and whatever else has an end."""
    now_s = NOW_S
    bounds = StorageLimits(50, 1 << 20, lambda: now_s)

    async def work(stored: StoredResponses) -> None:
        nonlocal now_s
        kept = StoredObjects(stored._database, SECRET, FairWorkers(Shares({})), bounds)
        await stored.put("acme", document("resp_1", created_s=NOW_S))
        assert await kept.insert("acme", "file", "a", b"x", NOW_S + 50)
        for moment in times:
            now_s = NOW_S + 50 * moment
            there = moment <= 1
            assert (await stored.get("acme", "resp_1") is not None) == there, moment
            assert (await kept.get("acme", "file", "a") is not None) == there, moment
            assert (len(await kept.all("acme", "file")), await kept.taken("acme") > 0) == (there, there), moment
        now_s = NOW_S + 50 * 1000
        assert await kept.insert("acme", "file", "a", b"y", now_s + 50)
        assert await kept.get("acme", "file", "a") == b"y"

    with tempfile.TemporaryDirectory() as folder:
        with_stored(Path(folder) / "responses.sqlite", work, bounds=bounds)


def test_a_name_is_free_once_its_object_is_over_however_many_others_are(tmp_path: Path, clock: Clock) -> None:
    async def run() -> None:
        kept = objects(tmp_path / "db", clock)
        for number in range(250):
            assert await kept.insert("acme", "file", str(number), b"x", NOW_S + 50)
        clock.now_s += 51
        for number in reversed(range(250)):
            assert await kept.insert("acme", "file", str(number), b"y", clock.now_s + 50), number
            assert await kept.get("acme", "file", str(number)) == b"y"

    asyncio.run(run())


def test_a_response_that_cannot_be_stored_is_refused_whole(tmp_path: Path) -> None:
    """A response above its tenant's bound, or an unreachable database, is an error with advice."""
    small = StorageLimits(50, 100)
    with pytest.raises(RequestTooLarge, match="store: false"):
        with_stored(tmp_path / "a.sqlite", lambda stored: stored.put("acme", document("resp_1", "x")), bounds=small)

    async def without_tables(stored: StoredResponses) -> None:
        with sqlite3.connect(tmp_path / "b.sqlite") as database:
            database.execute("DROP TABLE sealed_responses")
            database.execute("CREATE VIEW sealed_responses AS SELECT 1")
        database.close()
        with pytest.raises(Overloaded, match="store: false") as caught:
            await stored.put("acme", document("resp_1"))
        assert caught.value.code == "response_store_unavailable"

    with_stored(tmp_path / "b.sqlite", without_tables)


def objects(file: Path, clock: Clock | None = None, secret: bytes = SECRET) -> StoredObjects:
    bounds = StorageLimits(50, 1 << 20, time.time if clock is None else clock)
    return StoredObjects(open_database(None, file, bounds), secret, FairWorkers(Shares({})), bounds)


def test_a_file_of_objects_tells_nothing_and_none_passes_for_another(tmp_path: Path, clock: Clock) -> None:
    """Neither a tenant's name nor a text is in the database, and a row moved to another place does not open."""
    file = tmp_path / "f"

    async def run() -> None:
        stored, later = objects(file, clock), clock.now_s + 40
        for name in ("one", "two"):
            assert await stored.insert("acme", "file", name, b"the secret text " * 9, later)
        assert await stored.get("globex", "file", "one") is None
        assert await stored.all("acme", "line") == []
        assert await stored.ids("acme", "file") == {stored.id_of("acme", "file", name) for name in ("one", "two")}
        with sqlite3.connect(file) as database:
            text = str(database.execute("SELECT * FROM sealed_objects").fetchall())
            assert not any(word in text for word in ("acme", "secret", "one"))
            [[data]] = database.execute("SELECT data FROM sealed_objects LIMIT 1").fetchall()
            database.execute("UPDATE sealed_objects SET data = ?", [data])
        found = await stored.all("acme", "file")
        assert len(found) == 1, "only the row whose own data it is"
        assert await objects(file, clock, b"t" * 32).all("acme", "file") == []

    asyncio.run(run())


def test_changes_at_once_all_happen(tmp_path: Path) -> None:
    """Each is made on the last one's result, by any process."""
    many = [objects(tmp_path / "f") for _ in range(3)]

    async def run() -> bytes | None:
        await many[0].insert("acme", "count", "c", b"0", time.time() + 60)

        def more(value: bytes) -> bytes:
            return str(int(value) + 1).encode()

        await asyncio.gather(*(many[number % 3].change("acme", "count", "c", more) for number in range(30)))
        assert not await many[0].change("acme", "count", "c", lambda _: None)
        assert not await many[0].change("acme", "count", "none", more)
        return await many[1].get("acme", "count", "c")

    assert asyncio.run(run()) == b"30"
