"""What an ingress counts, by metric and labels: the values of /metrics, and for the page those of the last 15 minutes.

A page that opens later shows them too. Not thread-safe: one event loop makes all calls.
"""

import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, get_args

from router.protocol.samples import TIME_CELLS_S, TTFT_BUCKETS_S, Histogram, Labels, quantile_s
from serve_app.errors import remedy_of

BUCKET_S = 10
BUCKETS = 90
MINUTE = 6
"""Buckets of the last minute, including the one that is filling now."""
MAX_TENANTS = 256
"""The limit of tenants with buckets, about 150 KB for each busy one. The most recently active ones stay."""
WINDOWS_S = (60, 300, 900)
"""The spans that a table of tenants may show, up to now."""
ANSWER_BUCKETS_S = (*TTFT_BUCKETS_S[3:], 160.0, 320.0, 640.0)

GENERATIONS = frozenset({"chat", "completions", "messages", "responses"})
"""The endpoints that generate. Only they are in the figures of requests."""


def _outcome(labels: Mapping[str, str]) -> str:
    status = labels["status"]
    if labels.get("endpoint", "chat") not in GENERATIONS:
        return ""
    return "requests" if status == "200" else "refused" if status == "429" else "failed" if status >= "500" else ""


CACHED_TOKENS = "warmpath_tenant_cached_prompt_tokens_total"
_BY, _MISSED, _LOST = "refused by ", "missed by ", "lost by "

FIGURES: dict[str, str | Callable[[Mapping[str, str]], str]] = {
    "warmpath_requests_total": _outcome,
    "warmpath_broken_streams_total": _outcome,
    "warmpath_tenant_completion_tokens_total": "tokens",
    "warmpath_tenant_prompt_tokens_total": "prompt_tokens",
    CACHED_TOKENS: "cached_tokens",
    "warmpath_refusals_total": lambda labels: f"{_BY}{labels['place']}: {labels['limit']}",
    "warmpath_cache_misses_total": lambda labels: f"{_MISSED}{labels['reason']}",
    "warmpath_cache_missed_tokens_total": lambda labels: f"{_LOST}{labels['reason']}",
}
"""The name in a FIGURE (docs: api) of each counter that the page shows, or a function of its labels, "" for none."""
NAMES = ("requests", "refused", "failed", *(name for name in FIGURES.values() if isinstance(name, str)))
RATES = {"tokens": "tokens/s"}
"""The figures that the page shows as rates, each with a label, besides those that it words itself."""

Total = tuple[int, int, int]
"""Generations with a first token, their prompt tokens, and the cached ones of these."""


Span = Literal["ttft", "e2e"]
"""From a request's arrival to a first token, or to the end of its answer."""
Bucket = Counter[str | tuple[Span, int]]
"""Ten seconds: counts by name in a FIGURE, and of times by cell."""


def figure_of(bucket: Bucket, at_s: int) -> dict[str, Any]:
    """Return a bucket as a FIGURE (docs: api). ``at_s``: its start."""
    counts: dict[str, Any] = {name: bucket[name] for name in NAMES}
    named = _named(bucket, _BY)
    return {"at_s": at_s, **counts, **({"refused_by": named} if named else {}), **_quantiles(bucket)}


def _named(bucket: Bucket, prefix: str) -> dict[str, int]:
    """Return the counts whose names begin so, by the rest of their names, the largest first."""
    counts = {name.removeprefix(prefix): more for name, more in bucket.items() if str(name).startswith(prefix)}  # type: ignore[union-attr]
    return dict(sorted(counts.items(), key=lambda one: (-one[1], one[0])))


def refusals_of(bucket: Bucket) -> list[dict[str, Any]]:
    """Return the refused requests by limit, the most refused first, each with what the operator can do."""
    rows = []
    for name, requests in _named(bucket, _BY).items():
        place, limit = name.split(": ", 1)
        rows.append({"place": place, "limit": limit, "requests": requests, "remedy": remedy_of(limit)})
    return rows


def misses_of(bucket: Bucket) -> dict[str, tuple[int, int]]:
    """Return the prompts that missed by reason, the most frequent first, and their lost tokens."""
    return {reason: (missed, bucket[f"{_LOST}{reason}"]) for reason, missed in _named(bucket, _MISSED).items()}


def _quantiles(bucket: Bucket) -> dict[str, float | None]:
    quantiles: dict[str, float | None] = {}
    for span in get_args(Span):
        times = {key[1]: more for key, more in bucket.items() if isinstance(key, tuple) and key[0] == span}
        quantiles |= {f"{span}_p{share}_s": quantile_s(times, share / 100) for share in (50, 95)}
    return quantiles


Rings = Mapping[str | None, dict[int, Bucket]]
"""By tenant (None: all requests, also without a known tenant) and bucket number: seconds since 1970 // BUCKET_S."""


class Tally:
    """Counters and gauges by name and labels, and times by tenant, since the start.

    ``clock``: wall-clock time, which all ingresses share.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.values: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        self.times_s: dict[Span, defaultdict[str, Histogram]] = {
            span: defaultdict(lambda: Histogram(TIME_CELLS_S)) for span in get_args(Span)
        }
        self._clock = clock
        self._rings: OrderedDict[str | None, dict[int, Bucket]] = OrderedDict()
        self._looked = int(clock()) // BUCKET_S
        self._seen: dict[tuple[str, Labels], float] = {}
        self._too_much: dict[tuple[str, Labels], float] = {}
        self._seen_times: dict[tuple[Span, str], list[int]] = {}

    def add(self, name: str, number: float = 1.0, **labels: str) -> None:
        """Add to a counter or a gauge."""
        if int(self._clock()) // BUCKET_S != self._looked:
            self._look()
        self.values[name, tuple(sorted(labels.items()))] += number

    def add_tokens(self, name: str, tokens: int, tenant: str) -> None:
        """Add to a tenant's counter, which never falls: what was too much (``tokens`` < 0) is left out of what follows.

        To whoever reads counters, a lower one has begun anew.
        """
        key = name, (("tenant", tenant),)
        more = tokens - self._too_much.pop(key, 0.0)
        if more < 0:
            self._too_much[key] = -more
        else:
            self.add(name, more, tenant=tenant)

    def first_token(self, tenant: str, ttft_s: float, prompt_tokens: int, cached_tokens: int) -> None:
        """Count a generation at its first token."""
        self.add("warmpath_tenant_prompt_tokens_total", prompt_tokens, tenant=tenant)
        self.add_tokens(CACHED_TOKENS, cached_tokens, tenant)
        self.times_s["ttft"][tenant].observe(ttft_s)

    def answered_whole(self, tenant: str, e2e_s: float) -> None:
        """Count an answer at its end."""
        self.times_s["e2e"][tenant].observe(e2e_s)

    def totals(self) -> dict[str, Total]:
        """Return what was counted at first tokens since the start, by tenant."""
        return {
            tenant: (
                times.count,
                int(self.values["warmpath_tenant_prompt_tokens_total", (("tenant", tenant),)]),
                int(self.values[CACHED_TOKENS, (("tenant", tenant),)]),
            )
            for tenant, times in self.times_s["ttft"].items()
            if times.count
        }

    def keep(self, tenants: Collection[str]) -> None:
        """Forget all other tenants, of which there may be any number."""
        self._look()
        kept = {None, *tenants}  # None: a value of no tenant
        for key in [key for key in self.values if dict(key[1]).get("tenant") not in kept]:
            del self.values[key]
            self._seen.pop(key, None)
            self._too_much.pop(key, None)
        for span, times in self.times_s.items():
            for tenant in times.keys() - set(tenants):
                del times[tenant]
                self._seen_times.pop((span, tenant), None)

    @property
    def rings(self) -> Rings:
        """The last 15 minutes."""
        self._look()
        return self._rings

    def _look(self) -> None:
        """Put what was counted since the last look into that look's bucket: a bucket's first count looks before."""
        gains: defaultdict[str, Bucket] = defaultdict(Counter)
        for key, value in self.values.items():
            name, labels = key
            if name in FIGURES and (gained := value - self._seen.get(key, 0.0)):
                self._seen[key] = value
                figure, named = FIGURES[name], dict(labels)
                if figure := figure if isinstance(figure, str) else figure(named):
                    gains[named["tenant"]][figure] += int(gained)
        for span, by_tenant in self.times_s.items():
            for tenant, times in by_tenant.items():
                seen = self._seen_times.get((span, tenant)) or [0] * len(times.counts)
                if seen != times.counts:
                    self._seen_times[span, tenant] = list(times.counts)
                    cells = enumerate(zip(times.counts, seen, strict=True))
                    gains[tenant].update({(span, cell): now - before for cell, (now, before) in cells if now > before})
        for tenant, more in gains.items():
            self._gain(None, more)
            self._gain(tenant, more)
            if len(self._rings) > MAX_TENANTS:
                self._rings.popitem(last=False)
        self._looked = int(self._clock()) // BUCKET_S

    def _gain(self, name: str | None, more: Bucket) -> None:
        ring, number = self._rings.setdefault(name, {}), self._looked
        self._rings.move_to_end(name)
        if number not in ring:
            # A clock that was set back by less than they last forgets nothing.
            for other in [other for other in ring if abs(other - number) >= BUCKETS]:
                del ring[other]
        ring.setdefault(number, Counter()).update(more)


def joined(before: Rings, more: Rings, most: int = BUCKETS) -> Rings:
    """Return the latest buckets of each ring. Buckets of ``more`` replace earlier ones, and its last is the last."""
    both = {name: {**before.get(name, {}), **more.get(name, {})} for name in {**before, **more}}
    last = {name: max(more.get(name) or both[name], default=0) for name in both}
    return {
        name: dict(sorted(each for each in ring.items() if each[0] <= last[name])[-most:])
        for name, ring in both.items()
    }


def rows_of(sources: Iterable[Rings], viewer: str | None, now_s: float) -> tuple[dict[int, dict[str, Any]], Bucket]:
    """Return a viewer's (None: an operator's) rows by time, and the sum of the last minute."""
    number, minute = int(now_s) // BUCKET_S, Bucket()
    sums: dict[int, Bucket] = {}
    for at, bucket in (each for rings in sources for each in rings.get(viewer, {}).items()):
        if number - BUCKETS < at <= number + 1:
            sums.setdefault(at, Counter()).update(bucket)
        if number - MINUTE < at <= number + 1:
            minute.update(bucket)
    return {at * BUCKET_S: figure_of(bucket, at * BUCKET_S) for at, bucket in sorted(sums.items())}, minute


def sums_of(rings: Rings, now_s: float, window_s: int) -> dict[str, Bucket]:
    """Return what was counted in a span up to now, by tenant. ``window_s``: see ``WINDOWS_S``, and ``begin_of``."""
    first = begin_of(now_s, window_s) // BUCKET_S
    sums: dict[str, Bucket] = {}
    for tenant, ring in rings.items():
        if tenant is None:  # all of them
            continue
        for at, bucket in ring.items():
            if first <= at <= int(now_s) // BUCKET_S + 1:
                sums.setdefault(tenant, Counter()).update(bucket)
    return sums


def begin_of(now_s: float, window_s: int) -> int:
    """Return when the buckets of a span begin: the last one is filling now."""
    return (int(now_s) // BUCKET_S + 1) * BUCKET_S - window_s
