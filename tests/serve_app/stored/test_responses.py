"""No tenant reads another's response, nor does anyone with the database alone."""

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.errors import Overloaded, RequestTooLarge, ResponseDamaged
from serve_app.fairness.shares import Shares
from serve_app.fairness.workers import FairWorkers
from serve_app.stored.databases import StorageLimits, StoreError, open_database
from serve_app.stored.responses import Document, StoredResponses

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
