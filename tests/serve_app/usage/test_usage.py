"""Usage is counted once, survives restarts, and adds up over processes."""

import csv
import io
import sqlite3
import stat
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from serve_app.engine.protocol import Prefilled
from serve_app.errors import InvalidRequest
from serve_app.ingress.observe.answer_meter import charge_unanswered
from serve_app.usage import Counts, Ledger, LedgerError, UsageKey, UsageRows, days, merged, usage_csv, usage_document
from tests.serve_app.ingress.scripted import GENERATION

DAY = datetime(2027, 1, 31, tzinfo=UTC)


def ledger_of(file: Path | None, now: Callable[[], datetime] = lambda: DAY) -> Ledger:
    return Ledger(file, 16, now=now)


def everything(ledger: Ledger, tenant: str | None = None) -> UsageRows:
    return ledger.read("0000-00-00", "9999-99-99", tenant)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from(["acme", "zeta"]),
            st.sampled_from(["", "clerk@1"]),
            st.integers(1, 200),
            st.integers(0, 1),
            st.booleans(),
            st.integers(0, 50),
        ),
        max_size=30,
    )
)
def test_counts_are_conserved(asked: list[tuple[int, str, str, int, int, bool, int]]) -> None:
    """Over two files: read, written and uncached tokens add up to the prompt's, per tenant and prompt, none negative.

    docs: tenants
    """
    both = [ledger_of(None), ledger_of(None)]
    expected: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for which, tenant, prompt, tokens, cached_blocks, stored, output in asked:
        cached = min(cached_blocks * 16, (tokens - 1) // 16 * 16)
        both[which].prompt(tenant, "m", prompt, tokens, cached, stored=stored)
        both[which].answer(tenant, "m", prompt, output)
        if output % 2:
            both[which].flush()
        sums = expected[tenant, prompt]
        expected[tenant, prompt] = [sums[0] + tokens, sums[1] + cached, sums[2] + output]
    rows = merged([(one.file_id, everything(one)) for one in (*both, both[0])])  # a repeated file counts once
    assert {
        (key.tenant, key.prompt): [counts.prompt_tokens, counts.cached_tokens, counts.output_tokens]
        for key, counts in rows
    } == expected
    for _, counts in rows:
        assert counts.prompt_tokens == counts.cached_tokens + counts.written_tokens + counts.uncached_tokens
        assert min(counts) >= 0 <= counts.uncached_tokens
    for tenant in ("acme", "zeta"):
        assert {key.tenant for key, _ in everything(both[0], tenant)} <= {tenant}


def test_a_file_survives_and_is_shared(tmp_path: Path) -> None:
    """Two ingresses add to one private file, and the next process finds everything. (docs: isolation)"""
    file = tmp_path / "usage.sqlite"
    one, other = ledger_of(file), ledger_of(file)
    for ledger in (one, other):
        ledger.prompt("acme", "m", "", 100, 0, stored=True)
        ledger.answer("acme", "m", "", 5)
    readings = [(ledger.file_id, everything(ledger)) for ledger in (one, other)]
    assert [counts.requests for _, counts in merged(readings)] == [2]
    one.flush()
    other.flush()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    later = ledger_of(file)
    assert everything(later) == [(UsageKey("2027-01-31", "acme", "m", ""), Counts(2, 0, 200, 0, 192, 10))]
    assert later.file_id == one.file_id


def test_usage_that_cannot_be_written_is_kept(tmp_path: Path) -> None:
    """A file that fails for a while loses nothing."""
    ledger = ledger_of(tmp_path / "usage.sqlite")
    with closing(sqlite3.connect(tmp_path / "usage.sqlite")) as other:
        other.execute("ALTER TABLE usage RENAME TO away")
        ledger.answer("acme", "m", "", 5)
        ledger.flush()
        assert other.execute("SELECT * FROM away").fetchall() == []
        other.execute("ALTER TABLE away RENAME TO usage")
    ledger.answer("acme", "m", "", 5)
    assert [counts.output_tokens for _, counts in everything(ledger)] == [10]
    with pytest.raises(LedgerError, match="usage_file"):
        ledger_of(Path("/nowhere/usage.sqlite"))


def test_days_that_are_too_old_go() -> None:
    now = [DAY]
    ledger = ledger_of(None, lambda: now[0])
    ledger.answer("acme", "m", "p@1", 1)
    assert [key.day for key, _ in everything(ledger)] == ["2027-01-31"]
    now[0] = datetime(2028, 12, 31, tzinfo=UTC)
    ledger.answer("acme", "m", "", 1)
    assert [key.day for key, _ in everything(ledger)] == ["2028-12-31"]


def test_documents() -> None:
    """JSON and CSV have the same rows."""
    rows = [(UsageKey("2027-01-31", "acme", "m", "clerk@1"), Counts(2, 1, 200, 96, 96, 10))]
    document = usage_document("2027-01-31", "2027-01-31", rows)
    (row,) = document["data"]
    assert (row["uncached_tokens"], document["total"]["requests"]) == (8, 2)
    (line,) = csv.DictReader(io.StringIO(usage_csv(rows)))
    assert line == {name: str(value) for name, value in row.items()}
    assert usage_csv([]).startswith("day,tenant,")


def test_days() -> None:
    """The default is the last thirty; an invalid range is a 400."""
    today = date(2027, 1, 31)
    assert days(None, None, today) == ("2027-01-02", "2027-01-31")
    assert days("2026-12-31", "2027-01-01", today) == ("2026-12-31", "2027-01-01")
    for start, end in (("x", None), ("2027-02-01", None), ("2020-01-01", None), (None, "31.1.2027")):
        with pytest.raises(InvalidRequest):
            days(start, end, today)


def test_a_prompt_that_was_left_is_charged_as_far_as_it_was_computed_and_is_no_request() -> None:
    """Once for all choices, and nothing while it only waited. docs: isolation"""
    ledger = ledger_of(None)
    asked = structs.replace(GENERATION, model="m", charged=True)
    for left, done in (
        (asked, Prefilled(70, 32)),
        (structs.replace(asked, store_kv=False), Prefilled(70, 32)),
        (asked, Prefilled(0, 0)),
        (asked, Prefilled(64, 64)),
        (structs.replace(asked, charged=False), Prefilled(70, 0)),
    ):
        charge_unanswered(ledger, left, done)
    ((key, counts),) = everything(ledger)
    assert (key.tenant, key.model) == (asked.tenant, "m")
    assert counts == Counts(0, 0, 140, 64, 32, 0) and counts.uncached_tokens == 6 + 38
