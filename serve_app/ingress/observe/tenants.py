"""The table of tenants: what each sent in a span of time, how fast it was answered, and what it holds in the caches.

Counts come from the tallies of all ingresses, caches from the replicas' reports.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from router.protocol.samples import Sample
from serve_app.cache_misses.rules import REMEDIES
from serve_app.config.tenants import PriceConfig
from serve_app.live.tally import Bucket, figure_of, misses_of, refusals_of
from serve_app.usage import UsageRows, cost_of, saved_by_cache

TenantRow = dict[str, Any]

MAX_ROWS = 256
"""The limit of tenants in one table: those with the most requests."""
_REMEDIES = dict[str, str](REMEDIES.items())
MAX_REFUSALS = 64
"""The limit of rows about refusals."""


def held_tokens(reports: Iterable[Sequence[Sample]], block_size: int) -> tuple[Counter[str], int]:
    """Return the tokens in all pools by owner, and those that the pools have room for. ``reports``: of each replica."""
    blocks: Counter[str] = Counter()
    pool = 0
    for samples in reports:
        for name, labels, value in samples:
            if name == "warmpath_tenant_kv_cache_blocks":
                blocks[dict(labels)["tenant"]] += int(value)
            elif name == "warmpath_kv_cache_blocks":
                pool += int(value)
    return Counter({owner: number * block_size for owner, number in blocks.items()}), pool * block_size


def tenant_row(tenant: str, counts: Bucket, over_s: float) -> TenantRow:
    """Return what a tenant sent in a span: its counts, rates a second, times, and what was refused or missed, by cause.

    ``over_s``: the length of the span.
    """
    figure = figure_of(counts, 0)
    prompt, cached = figure["prompt_tokens"], figure["cached_tokens"]
    totals = {"prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": figure["tokens"]}
    rates = {f"{name}_per_s": round(total / over_s, 3) for name, total in totals.items()}
    missed = [
        {"reason": reason, "requests": requests, "lost_tokens": lost, "remedy": _REMEDIES.get(reason, "")}
        for reason, (requests, lost) in misses_of(counts).items()
    ]
    return {
        "tenant": tenant,
        **{name: figure[name] for name in ("requests", "refused", "failed")},
        "requests_per_s": round(figure["requests"] / over_s, 3),
        **totals,
        **rates,
        "hit_rate": round(cached / prompt, 4) if prompt else None,
        **{name: figure[name] for name in ("ttft_p50_s", "ttft_p95_s", "e2e_p50_s", "e2e_p95_s")},
        "refused_by": refusals_of(counts),
        "missed_by": missed,
    }


def tenant_rows(
    counts: Iterable[Mapping[str, Bucket]], names: Iterable[str], over_s: float, viewer: str | None = None
) -> list[TenantRow]:
    """Return the rows of the tenants ``names`` and of all others with requests, those with the most first.

    ``counts``: of each ingress. ``viewer``: the only tenant, or None: all. Ties are in the order of names.
    """
    sums: dict[str, Bucket] = {name: Counter() for name in names}
    for tenant, bucket in _of(counts, viewer):
        sums.setdefault(tenant, Counter()).update(bucket)

    def order(tenant: str) -> tuple[int, str]:
        bucket = sums[tenant]
        return -(bucket["requests"] + bucket["refused"] + bucket["failed"]), tenant

    return [tenant_row(tenant, sums[tenant], over_s) for tenant in sorted(sums, key=order)[:MAX_ROWS]]


def refusals_by_tenant(counts: Iterable[Mapping[str, Bucket]], viewer: str | None) -> list[TenantRow]:
    """Return the requests that limits refused, by tenant and limit, the most refused first."""
    sums: dict[str, Bucket] = {}
    for tenant, bucket in _of(counts, viewer):
        sums.setdefault(tenant, Counter()).update(bucket)
    rows = [{"tenant": tenant, **row} for tenant, bucket in sums.items() for row in refusals_of(bucket)]
    return sorted(rows, key=lambda row: (-row["requests"], row["tenant"]))[:MAX_REFUSALS]


def spent_today(rows: UsageRows, prices: Mapping[str, PriceConfig]) -> dict[str, TenantRow]:
    """Return by tenant what rows of usage cost, and how much less than without a cache."""
    sums: dict[str, list[Decimal]] = {}
    for key, counts in rows:
        price = prices.get(key.model)
        both = sums.setdefault(key.tenant, [Decimal(), Decimal()])
        both[0] += cost_of(counts, price)
        both[1] += saved_by_cache(counts, price)
    return {tenant: {"cost": float(cost), "saved": float(saved)} for tenant, (cost, saved) in sums.items()}


def _of(counts: Iterable[Mapping[str, Bucket]], viewer: str | None) -> Iterator[tuple[str, Bucket]]:
    for one in counts:
        yield from one.items() if viewer is None else [(viewer, one[viewer])] if viewer in one else []
