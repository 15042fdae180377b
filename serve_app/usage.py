"""Usage by tenant and day, in memory or in a SQLite file, which several ingresses may share, and its reports.

``Ledger`` counts in the event loop; ``read`` and ``flush`` wait for the disk, so call them in a thread. ``Ledgers``
writes regularly, and merges those of all ingresses on request.
"""

from __future__ import annotations

import asyncio
import csv
import io
import logging
import operator
import os
import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import reduce
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from uuid import uuid4

from router.background import run_in_background
from serve_app.config.tenants import PriceConfig
from serve_app.errors import InvalidRequest

logger = logging.getLogger(__name__)

FLUSH_S = 5.0
"""Interval between writes, and so the maximum loss in a crash."""
KEPT_DAYS = 400


class UsageKey(NamedTuple):
    """A key of usage. ``day``: YYYY-MM-DD in UTC; ``prompt``: a request's NAME@VERSION, "" for none."""

    day: str
    tenant: str
    model: str
    prompt: str


class Counts(NamedTuple):
    """Requests with a first token, the part of them with cache reads, and their tokens.

    A prompt with many choices counts once, and one that was left before its first token as far as it was computed.
    ``written_tokens``: computed in whole blocks that stay cached.
    """

    requests: int = 0
    reused_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    output_tokens: int = 0

    def plus(self, other: Counts) -> Counts:
        """Return the sum of both."""
        return Counts(*map(operator.add, self, other))

    @property
    def tokens(self) -> int:
        """All tokens, of prompts and answers."""
        return self.prompt_tokens + self.output_tokens

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens neither read from the cache nor written to it."""
        return self.prompt_tokens - self.cached_tokens - self.written_tokens


_TABLES = f"""
CREATE TABLE IF NOT EXISTS file (id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL, prompt TEXT NOT NULL,
    {", ".join(f"{name} INTEGER NOT NULL" for name in Counts._fields)},
    PRIMARY KEY (day, tenant, model, prompt)
) WITHOUT ROWID;
INSERT INTO file SELECT '{{}}' WHERE NOT EXISTS (SELECT 1 FROM file)
"""  # noqa: S608 (built from the names above)
_ADD = f"""
INSERT INTO usage VALUES ({", ".join("?" * len(UsageKey._fields + Counts._fields))})
ON CONFLICT DO UPDATE SET {", ".join(f"{name} = {name} + excluded.{name}" for name in Counts._fields)}
"""  # noqa: S608 (built from the names above)


class LedgerError(ValueError):
    """The file cannot be used; the message names it and the reason."""


class Ledger:
    """Counts usage. ``file`` None: in memory. ``block_size``: tokens of a block; 0: no cache. ``heard``: told of each
    count. Raises LedgerError.
    """

    def __init__(
        self,
        file: Path | None,
        block_size: int,
        heard: Sequence[Callable[[UsageKey, Counts], object]] = (),
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._block_size = block_size
        self._now = now
        self._new: dict[UsageKey, Counts] = {}
        self._lock = Lock()
        self._counting = Lock()
        self._heard = heard
        try:
            if file is not None:  # it names tenants
                file = file.expanduser()
                os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
            self._database = sqlite3.connect(file or ":memory:", timeout=10, check_same_thread=False)
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                for statement in _TABLES.format(uuid4().hex).split(";"):
                    self._database.execute(statement)
            self.file_id: str = self._database.execute("SELECT id FROM file").fetchone()[0]
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(f"cannot keep usage in {file} ({error}); name another usage_file") from error

    def prompt(
        self,
        tenant: str,
        model: str,
        prompt: str,
        prompt_tokens: int,
        cached_tokens: int,
        *,
        stored: bool,
        answered: bool = True,
        block_size: int | None = None,
        instead_of: int | None = None,
    ) -> int:
        """Count a prompt at its first token; return its tokens written to the cache, 0 unless ``stored``.

        ``block_size``: of the model's cache, if it is another one than the ledger's. ``instead_of``: the cached tokens
        that it was counted with before, wrongly: what is counted and returned is then the difference.
        ``answered`` False: the computed part of a prompt whose request was left before its first token.
        """
        size = self._block_size if block_size is None else block_size
        whole = prompt_tokens // size * size if size and stored else 0

        def counted(cached: int) -> Counts:
            return Counts(0, int(answered and cached > 0), prompt_tokens, cached, max(0, whole - cached))

        counts = counted(cached_tokens)
        if instead_of is not None:
            counts = Counts(*map(operator.sub, counts, counted(instead_of)))
        self._count(UsageKey(self._day(), tenant, model, prompt), counts)
        return counts.written_tokens

    def answer(self, tenant: str, model: str, prompt: str, output_tokens: int) -> None:
        """Count the end of a request with at least one token."""
        counts = Counts(requests=1, output_tokens=output_tokens)
        self._count(UsageKey(self._day(), tenant, model, prompt), counts)

    def flush(self) -> None:
        """Write new counts; after a failure they are kept for the next write."""
        with self._lock:
            with self._counting:
                new, self._new = self._new, {}
            try:
                with self._database:
                    self._database.execute("BEGIN IMMEDIATE")
                    self._database.execute("DELETE FROM usage WHERE day < ?", (self._day(-KEPT_DAYS),))
                    self._database.executemany(_ADD, [(*key, *counts) for key, counts in new.items()])
            except sqlite3.Error:
                logger.exception("usage was not written; it is tried again")
                for key, counts in new.items():
                    self._add(key, counts)

    def read(self, first_day: str, last_day: str, tenant: str | None) -> list[tuple[UsageKey, Counts]]:
        """Return the usage from one day to another, of all tenants or one, in the order of the keys."""
        self.flush()
        query = (
            "SELECT * FROM usage WHERE day BETWEEN ? AND ? AND (? IS NULL OR tenant = ?) "
            "ORDER BY day, tenant, model, prompt"
        )
        with self._lock, closing(self._database.execute(query, (first_day, last_day, tenant, tenant))) as rows:
            return [(UsageKey(*row[:4]), Counts(*row[4:])) for row in rows]

    def _day(self, offset_days: int = 0) -> str:
        return (self._now() + timedelta(offset_days)).date().isoformat()

    def _count(self, key: UsageKey, counts: Counts) -> None:
        self._add(key, counts)
        for tell in self._heard:
            tell(key, counts)

    def _add(self, key: UsageKey, counts: Counts) -> None:
        with self._counting:  # never held during disk access
            self._new[key] = self._new.get(key, Counts()).plus(counts)


DEFAULT_DAYS = 30
_PRICED_TOKENS = 1_000_000

UsageRows = list[tuple[UsageKey, Counts]]


def days(start: str | None, end: str | None, today: date) -> tuple[str, str]:
    """Return the first and the last day, by default the last ``DEFAULT_DAYS``. Raises InvalidRequest."""
    last = _day(end, "end_date") if end is not None else today
    first = _day(start, "start_date") if start is not None else last - timedelta(days=DEFAULT_DAYS - 1)
    if not timedelta() <= last - first <= timedelta(days=KEPT_DAYS):
        raise InvalidRequest(f"start_date must lie 0 to {KEPT_DAYS} days before end_date.", param="start_date")
    return first.isoformat(), last.isoformat()


def merged(readings: Iterable[tuple[str, UsageRows]]) -> UsageRows:
    """Merge the rows of several ledgers. Readings with one file id are of the same counters."""
    files: dict[str, dict[UsageKey, Counts]] = {}
    for file_id, rows in readings:
        latest = files.setdefault(file_id, {})
        for key, counts in rows:  # counters grow, but for rare corrections, so the maximum is the latest reading
            latest[key] = Counts(*map(max, latest.get(key, Counts()), counts))
    total: dict[UsageKey, Counts] = {}
    for latest in files.values():
        for key, counts in latest.items():
            total[key] = total.get(key, Counts()).plus(counts)
    return sorted(total.items())


def cost_of(counts: Counts, price: PriceConfig | None) -> Decimal:
    """Return what tokens cost; without a price, nothing."""
    if price is None:
        return Decimal()
    parts = (
        counts.uncached_tokens * price.input,
        counts.cached_tokens * price.read,
        counts.written_tokens * price.written,
        counts.output_tokens * price.output,
    )
    return sum(parts, Decimal()) / _PRICED_TOKENS


def most_cost(counts: Counts, price: PriceConfig | None) -> Decimal:
    """Return the most that so many tokens may cost, however much is cached; without a price, nothing."""
    if price is None:
        return Decimal()
    prompt = counts.prompt_tokens * max(price.input, price.read, price.written)
    return (prompt + counts.output_tokens * price.output) / _PRICED_TOKENS


def saved_by_cache(counts: Counts, price: PriceConfig | None) -> Decimal:
    """Return how much less tokens cost than without a cache; below zero if writes cost more than reads brought."""
    if price is None:
        return Decimal()
    return counts.prompt_tokens * price.input / _PRICED_TOKENS - cost_of(counts._replace(output_tokens=0), price)


def usage_document(
    first_day: str, last_day: str, rows: UsageRows, prices: Mapping[str, PriceConfig] | None = None
) -> dict[str, Any]:
    """Return the body of ``/v1/usage``, by ``prices`` of models and adapters with money, exact to twelve digits."""
    data = [_row(key, counts, prices or {}) for key, counts in rows]
    total: dict[str, Any] = dict(_columns(reduce(Counts.plus, (counts for _, counts in rows), Counts())))
    for name in ("cost", "saved") if prices else ():
        total[name] = float(sum((row[name] for row in data), Decimal()))
    return {
        "object": "usage",
        "start_date": first_day,
        "end_date": last_day,
        "data": [_as_json(row) for row in data],
        "total": total,
    }


def usage_csv(rows: UsageRows, prices: Mapping[str, PriceConfig] | None = None) -> str:
    """Return the rows as CSV with a header."""
    prices = prices or {}
    text = io.StringIO()
    writer = csv.DictWriter(text, [*_row(UsageKey("", "", "", ""), Counts(), prices)])
    writer.writeheader()
    writer.writerows(_as_json(_row(key, counts, prices)) for key, counts in rows)
    return text.getvalue()


def _row(key: UsageKey, counts: Counts, prices: Mapping[str, PriceConfig]) -> dict[str, Any]:
    """Return a row of usage; with prices, also what it cost, and what the cache saved of it."""
    row: dict[str, Any] = {**key._asdict(), **_columns(counts)}
    if prices:
        price = prices.get(key.model)
        row["cost"], row["saved"] = cost_of(counts, price), saved_by_cache(counts, price)
        row["break_even_reads"] = None if price is None else price.break_even_reads
    return row


def _as_json(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(value) if isinstance(value, Decimal) else value for name, value in row.items()}


def _columns(counts: Counts) -> dict[str, int]:
    return {**counts._asdict(), "uncached_tokens": counts.uncached_tokens}


def _day(text: str, name: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"{name} must be a day in UTC, such as 2027-01-31.", param=name) from None


class Ledgers:
    """Reads and writes usage. ``ingresses``: calls a method of all ingresses; returns nothing if there is only one."""

    def __init__(self, ledger: Ledger, ingresses: Callable[..., Awaitable[list[Any]]]) -> None:
        self._ledger = ledger
        self._ingresses = ingresses
        self._writing = run_in_background(self._write)

    async def here(self, first_day: str, last_day: str, tenant: str | None) -> tuple[str, UsageRows]:
        """Return the id of this ingress' file, and its rows from one day to another, of a tenant or (None) all."""
        return self._ledger.file_id, await asyncio.to_thread(self._ledger.read, first_day, last_day, tenant)

    async def everywhere(self, first_day: str, last_day: str, tenant: str | None) -> UsageRows:
        """Return the rows of all ingresses."""
        query = first_day, last_day, tenant
        return merged(await self._ingresses("usage", *query) or [await self.here(*query)])

    async def flush(self) -> None:
        """Write the counts to the file."""
        await asyncio.to_thread(self._ledger.flush)

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()
