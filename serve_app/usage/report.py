"""Usage as clients see it: a document of rows and their sum, or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict
from datetime import date, timedelta
from typing import Any

from serve_app.config.usage import PricesConfig
from serve_app.errors import InvalidRequest
from serve_app.usage.counts import Counts, UsageKey, costs
from serve_app.usage.ledger import KEPT_DAYS

DEFAULT_DAYS = 30

Rows = list[tuple[UsageKey, Counts]]


def days(start: str | None, end: str | None, today: date) -> tuple[str, str]:
    """Return the first and the last day that are asked for; by default the last ``DEFAULT_DAYS``.

    Raises InvalidRequest.
    """
    last = _day(end, "end_date") if end is not None else today
    first = _day(start, "start_date") if start is not None else last - timedelta(days=DEFAULT_DAYS - 1)
    if not timedelta() <= last - first <= timedelta(days=KEPT_DAYS):
        raise InvalidRequest(f"start_date must lie 0 to {KEPT_DAYS} days before end_date.", param="start_date")
    return first.isoformat(), last.isoformat()


def merged(readings: Iterable[tuple[str, Rows]]) -> Rows:
    """Return the rows of several ledgers as one. Readings of one file, of the same id, are of the same counters."""
    files: dict[str, dict[UsageKey, Counts]] = {}
    for file_id, rows in readings:
        known = files.setdefault(file_id, {})
        for key, counts in rows:
            known[key] = known[key].newest(counts) if key in known else counts
    total: dict[UsageKey, Counts] = {}
    for known in files.values():
        for key, counts in known.items():
            total.setdefault(key, Counts()).add(counts)
    return sorted(total.items(), key=lambda row: row[0])


def usage_document(first_day: str, last_day: str, rows: Rows, prices: PricesConfig | None) -> dict[str, Any]:
    """Return the body of ``/v1/usage``."""
    total = Counts()
    for _, counts in rows:
        total.add(counts)
    return {
        "object": "usage",
        "start_date": first_day,
        "end_date": last_day,
        "prices": prices.model_dump() if prices is not None else None,
        "data": [{**key._asdict(), **_shown(counts, prices)} for key, counts in rows],
        "total": _shown(total, prices),
    }


def usage_csv(rows: Rows, prices: PricesConfig | None) -> str:
    """Return the rows as CSV with a header; costs are columns of their own."""
    text = io.StringIO()
    names = [*UsageKey._fields, *_flat(Counts(), prices)]
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows({**key._asdict(), **_flat(counts, prices)} for key, counts in rows)
    return text.getvalue()


def _shown(counts: Counts, prices: PricesConfig | None) -> dict[str, Any]:
    shown: dict[str, Any] = {**asdict(counts), "uncached_tokens": counts.uncached_tokens}
    return shown if prices is None else {**shown, "cost": costs(counts, prices)}


def _flat(counts: Counts, prices: PricesConfig | None) -> dict[str, Any]:
    shown = _shown(counts, prices)
    return {**shown, **{f"cost_{rule}": cost for rule, cost in shown.pop("cost", {}).items()}}


def _day(text: str, name: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"{name} must be a day in UTC, such as 2027-01-31.", param=name) from None
