"""Reports of usage for clients: a document of rows and their sum, or CSV."""

import csv
import io
from collections.abc import Iterable
from datetime import date, timedelta
from functools import reduce
from typing import Any

from serve_app.errors import InvalidRequest
from serve_app.usage.ledger import KEPT_DAYS, Counts, UsageKey

DEFAULT_DAYS = 30

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
        known = files.setdefault(file_id, {})
        for key, counts in rows:  # counters only grow, so the maximum is the latest reading
            known[key] = Counts(*map(max, known.get(key, Counts()), counts))
    total: dict[UsageKey, Counts] = {}
    for known in files.values():
        for key, counts in known.items():
            total[key] = total.get(key, Counts()).plus(counts)
    return sorted(total.items())


def usage_document(first_day: str, last_day: str, rows: UsageRows) -> dict[str, Any]:
    """Return the body of ``/v1/usage``."""
    return {
        "object": "usage",
        "start_date": first_day,
        "end_date": last_day,
        "data": [{**key._asdict(), **_shown(counts)} for key, counts in rows],
        "total": _shown(reduce(Counts.plus, (counts for _, counts in rows), Counts())),
    }


def usage_csv(rows: UsageRows) -> str:
    """Return the rows as CSV with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*UsageKey._fields, *_shown(Counts())])
    writer.writeheader()
    writer.writerows({**key._asdict(), **_shown(counts)} for key, counts in rows)
    return text.getvalue()


def _shown(counts: Counts) -> dict[str, int]:
    return {**counts._asdict(), "uncached_tokens": counts.uncached_tokens}


def _day(text: str, name: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"{name} must be a day in UTC, such as 2027-01-31.", param=name) from None
