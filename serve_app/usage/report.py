"""Usage as clients see it: a document of rows and their sum, or CSV; and what it would have cost elsewhere."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from datetime import date, timedelta
from functools import reduce
from typing import Any

from serve_app.config.usage import PricesConfig
from serve_app.errors import InvalidRequest
from serve_app.usage.ledger import KEPT_DAYS, Counts, UsageKey

DEFAULT_DAYS = 30
WRITE_5M, WRITE_1H, READ = 1.25, 2.0, 0.1
"""What a prompt token costs that is written to the cache for five minutes or an hour, or read from it, as parts of one
that is neither. Source: Anthropic's prices of prompt caching."""

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
        for key, counts in rows:  # they only grow: the later of two readings has more
            known[key] = Counts(*map(max, known.get(key, Counts()), counts))
    total: dict[UsageKey, Counts] = {}
    for known in files.values():
        for key, counts in known.items():
            total[key] = total.get(key, Counts()).plus(counts)
    return sorted(total.items())


def costs(counts: Counts, prices: PricesConfig) -> dict[str, float]:
    """Return what it would have cost without any cache, under Anthropic's rules for both TTLs, and under OpenAI's."""
    cached, written, uncached = counts.cached_tokens, counts.written_tokens, counts.uncached_tokens
    inputs = {
        "without_cache": float(counts.prompt_tokens),
        "anthropic_5m": uncached + WRITE_5M * written + READ * cached,
        "anthropic_1h": uncached + WRITE_1H * written + READ * cached,
        "openai": uncached + written + prices.openai_cached_part * cached,
    }
    output = counts.output_tokens * prices.output_per_million
    return {rule: round((tokens * prices.input_per_million + output) / 1e6, 6) for rule, tokens in inputs.items()}


def usage_document(first_day: str, last_day: str, rows: Rows, prices: PricesConfig | None) -> dict[str, Any]:
    """Return the body of ``/v1/usage``."""
    return {
        "object": "usage",
        "start_date": first_day,
        "end_date": last_day,
        "prices": prices.model_dump() if prices is not None else None,
        "data": [{**key._asdict(), **_shown(counts, prices)} for key, counts in rows],
        "total": _shown(reduce(Counts.plus, (counts for _, counts in rows), Counts()), prices),
    }


def usage_csv(rows: Rows, prices: PricesConfig | None) -> str:
    """Return the rows as CSV with a header; costs are columns of their own."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*UsageKey._fields, *_flat(Counts(), prices)])
    writer.writeheader()
    writer.writerows({**key._asdict(), **_flat(counts, prices)} for key, counts in rows)
    return text.getvalue()


def _shown(counts: Counts, prices: PricesConfig | None) -> dict[str, Any]:
    shown: dict[str, Any] = {**counts._asdict(), "uncached_tokens": counts.uncached_tokens}
    return shown if prices is None else {**shown, "cost": costs(counts, prices)}


def _flat(counts: Counts, prices: PricesConfig | None) -> dict[str, Any]:
    shown = _shown(counts, prices)
    return {**shown, **{f"cost_{rule}": cost for rule, cost in shown.pop("cost", {}).items()}}


def _day(text: str, name: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"{name} must be a day in UTC, such as 2027-01-31.", param=name) from None
