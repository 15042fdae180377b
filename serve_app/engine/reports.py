"""What every engine reports: counters and smoothed rates, its load, outputs by submitter.

Counters' names are vLLM's suffixes under ``warmpath_``. Written by the engine's thread alone; any thread may read
samples.
"""

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, get_args

from router.protocol.events import LoadReport
from router.protocol.request import Decision
from router.protocol.samples import Histogram, Labels, Mean, Rate, Sample
from serve_app.cache.prefix.pins import Pins
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.protocol import EngineOutput, FinishReason, OutputSink, SaveOutcome

TENANT_LABELS = 100
"""Number of tenants counted under their own name; later ones count as "other", so that /metrics stays bounded."""

_PREFILL_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)
_QUEUE_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120)

_PREFILL_MEMORY_TOKENS = 8192.0
_PREFILL_LEAST_TOKENS = 128
_DECODE_WEIGHT = 0.1
_LINE_WEIGHT = 0.01


class FittedLine:
    """The line nearest to points above 0, ``base`` + ``each`` * x. ``weight``: the newest point's part of it."""

    def __init__(self, weight: float) -> None:
        self.each = 0.0
        self._weight = weight
        self._points = 0
        self._x = self._y = self._spread = self._shared = 0.0

    @property
    def base(self) -> float:
        """The value at 0."""
        return max(0.0, self._y - self.each * self._x)

    def observe(self, x: float, y: float) -> None:
        """Add a point."""
        self._points += 1
        part = max(self._weight, 1 / self._points)
        dx, dy = x - self._x, y - self._y
        self._x += part * dx
        self._y += part * dy
        self._spread = (1 - part) * (self._spread + part * dx * dx)
        self._shared = (1 - part) * (self._shared + part * dx * dy)
        if self._spread >= 1.0:  # points of one size say nothing about another
            self.each = min(max(0.0, self._shared / self._spread), self._y / self._x)


class EngineMeters:
    """Counters of an engine since its start."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self.recomputed_tokens = 0
        self.generation_tokens = 0
        # Counters exist before their first event, which a rate could not see otherwise.
        self.finished = Counter[str](dict.fromkeys(get_args(FinishReason), 0))
        self.saves = Counter[str](dict.fromkeys(get_args(SaveOutcome), 0))
        self.drafts: Counter[str] = Counter()
        """Counters of speculative drafts by sample name; empty if nothing drafts."""
        self.prefill_time = Histogram(_PREFILL_BUCKETS_S)
        self.queue_time = Histogram(_QUEUE_BUCKETS_S)
        self._queries: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()
        self._preemptions: Counter[str] = Counter()
        self._prefill = Rate()
        self._decode_s = Mean(_DECODE_WEIGHT)
        self._decode_line = FittedLine(_LINE_WEIGHT)

    @property
    def prefill_tokens_per_s(self) -> float:
        """The smoothed rate, 0.0 while unknown."""
        return self._prefill.per_s

    @property
    def decode_step_s(self) -> float:
        """The smoothed duration of a step without prefill, 0.0 while unknown."""
        return self._decode_s.value

    @property
    def decode_line_s(self) -> tuple[float, float]:
        """A step without prefill takes the first, and the second for each of its sequences; 0.0 while unknown."""
        return self._decode_line.base, self._decode_line.each

    @property
    def prefill_rate(self) -> "PrefillRate":
        """The smoothed rate, and the tokens behind it, older ones with a lower weight."""
        return PrefillRate.of(self._prefill)

    def admitted(self, tenant: str, prompt_tokens: int, cached_tokens: int, *, caching: bool) -> None:
        """Count a request's prefix-cache query once, when it is first scheduled."""
        self.prompt_tokens += prompt_tokens
        self._preemptions[_tenant_label(self._preemptions, tenant)] += 0
        if not caching:
            return
        name = _tenant_label(self._queries, tenant)
        self._queries[name] += prompt_tokens
        self._hits[name] += cached_tokens

    def stepped(self, prefill_tokens: int, duration_s: float, sequences: int = 1) -> None:
        """Smooth the rates over 8,192 prefill tokens and ten decode steps; tiny prefills do not show throughput.

        ``sequences``: of the step. What each of them takes is known from a hundred decode steps of several sizes.
        """
        if prefill_tokens == 0:
            self._decode_s.observe(duration_s)
            self._decode_line.observe(sequences, duration_s)
        elif duration_s > 0.0 and (prefill_tokens >= _PREFILL_LEAST_TOKENS or self.prefill_tokens_per_s == 0.0):
            kept = math.exp(-prefill_tokens / _PREFILL_MEMORY_TOKENS)
            self._prefill = self._prefill.then(prefill_tokens, duration_s, kept)

    def preempted(self, tenant: str) -> None:
        """Count a sequence that gave its blocks back before its end."""
        self._preemptions[_tenant_label(self._preemptions, tenant)] += 1

    def samples(self, labels: Labels) -> Iterable[Sample]:
        """Yield every counter, histogram and rate."""
        counted: tuple[tuple[str, str, Mapping[str, int]], ...] = (
            ("warmpath_prefix_cache_queries_total", "tenant", self._queries),
            ("warmpath_prefix_cache_hits_total", "tenant", self._hits),
            ("warmpath_requests_finished_total", "finished_reason", self.finished),
            ("warmpath_num_preemptions_total", "tenant", self._preemptions),
            ("warmpath_prompt_saves_total", "outcome", self.saves),
        )
        for name, label, counts in counted:
            for value, count in dict(counts).items():
                yield name, (*labels, (label, value)), float(count)
        for name, count in dict(self.drafts).items():
            yield name, labels, float(count)
        yield "warmpath_prompt_tokens_total", labels, float(self.prompt_tokens)
        yield "warmpath_prompt_tokens_computed_total", labels, float(self.computed_prompt_tokens)
        yield "warmpath_generation_tokens_total", labels, float(self.generation_tokens)
        yield "warmpath_recomputed_tokens_total", labels, float(self.recomputed_tokens)
        yield "warmpath_prefill_tokens_per_second", labels, self.prefill_tokens_per_s
        yield "warmpath_decode_step_seconds", labels, self.decode_step_s
        yield from self.prefill_time.samples("warmpath_request_prefill_time_seconds", labels)
        yield from self.queue_time.samples("warmpath_request_queue_time_seconds", labels)


def pin_samples(pins: Pins, labels: Labels, recalled: int) -> Iterable[Sample]:
    """Yield the pinned blocks in total and by tenant, their budget, and the pins ended to make space for others."""
    yield "warmpath_pinned_prefixes", labels, float(len(pins))
    yield "warmpath_pinned_blocks", labels, float(pins.blocks)
    yield "warmpath_pin_budget_blocks", labels, float(pins.budget_blocks)
    yield "warmpath_pins_recalled_total", labels, float(recalled)
    for tenant, blocks in _largest_tenants(pins.holdings()).items():
        yield "warmpath_tenant_pinned_blocks", (*labels, ("tenant", tenant)), float(blocks)


def gauge_samples(cache: PrefixCache, labels: Labels, block_bytes: int, running: int, waiting: int) -> Iterable[Sample]:
    """Yield the pool's blocks by state, a block's bytes, pins, and the numbers of running and waiting requests."""
    pool = cache.pool
    # A block held only by a pin is in use for the pool, but counts as cached here.
    kept = min(cache.pinned_idle_blocks(), pool.used_blocks)
    yield "warmpath_num_requests_running", labels, float(running)
    yield "warmpath_num_requests_waiting", labels, float(waiting)
    yield "warmpath_kv_cache_block_bytes", labels, float(block_bytes)
    yield from pin_samples(cache.pins, labels, cache.recalled_pins)
    for tenant, blocks in _largest_tenants(cache.quota.holdings()).items():
        yield "warmpath_tenant_kv_cache_blocks", (*labels, ("tenant", tenant)), float(blocks)
    yield "warmpath_prefix_cache_evicted_blocks_total", labels, float(cache.evicted_blocks)
    yield "warmpath_prefix_cache_evicted_reused_blocks_total", labels, float(cache.evicted_reused_blocks)
    states = (("used", pool.used_blocks - kept), ("cached", pool.idle_blocks + kept), ("free", pool.free_blocks))
    for state, blocks in states:
        yield "warmpath_kv_cache_blocks", (*labels, ("state", state)), float(blocks)


def _tenant_label(counts: Mapping[str, int], tenant: str) -> str:
    return tenant if tenant in counts or len(counts) < TENANT_LABELS else "other"


def _largest_tenants(by_tenant: Mapping[str, int]) -> dict[str, int]:
    """Return the ``TENANT_LABELS`` largest figures by tenant, and the sum of the rest as "other"."""
    if len(by_tenant) <= TENANT_LABELS:
        return dict(by_tenant)
    ordered = sorted(by_tenant.items(), key=lambda item: (-item[1], item[0]))
    largest = dict(ordered[:TENANT_LABELS])
    largest["other"] = largest.get("other", 0) + sum(blocks for _, blocks in ordered[TENANT_LABELS:])
    return largest


ROUTERS_REMEMBERED = 256
"""Number of routers with a remembered reservation; the one silent for longest is dropped first."""


class RouterReservations:
    """The last reservation of each router that has arrived here."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()

    def arrived(self, decision: Decision | None) -> None:
        """Note the arrival of a request that a router decided on; None: no router did."""
        if decision is None:
            return
        router_id = decision.router_id
        self._last[router_id] = max(self._last.get(router_id, 0), decision.reservation)
        self._last.move_to_end(router_id)
        if len(self._last) > ROUTERS_REMEMBERED:
            self._last.popitem(last=False)

    def admitted(self) -> dict[str, int]:
        """Return each router's last reservation."""
        return dict(self._last)


class PrefillRate(NamedTuple):
    """Prefill tokens per second, 0.0 while unknown, and the recent tokens behind it, 0 if it is not measured."""

    tokens_per_s: float
    tokens: int = 0

    @classmethod
    def of(cls, measured: Rate) -> "PrefillRate":
        """Return a measured rate."""
        return cls(measured.per_s, round(measured.amount))


class LoadReports:
    """Builds the load reports of one replica, whatever computes there."""

    def __init__(self, max_running: int, max_waiting: int, rate: Callable[[], PrefillRate]) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._rate = rate
        self._reservations = RouterReservations()

    def arrived(self, decision: Decision | None) -> None:
        """Note the arrival of a request that a router decided on; None: no router did."""
        self._reservations.arrived(decision)

    def report(
        self, now_s: float, *, queued_tokens: int, running: int, waiting: int, committed: tuple[int, int] = (0, 1)
    ) -> LoadReport:
        """Return the load as one message. ``committed``: tokens and sequences before any newcomer (``LoadReport``)."""
        tokens_per_s, rate_tokens = self._rate()
        return LoadReport(
            queued_prefill_tokens=queued_tokens,
            running_sequences=running,
            waiting_sequences=waiting,
            max_running_sequences=self._max_running,
            max_waiting_sequences=self._max_waiting,
            prefill_tokens_per_s=tokens_per_s,
            prefill_rate_tokens=rate_tokens,
            admitted=self._reservations.admitted(),
            committed_prefill_tokens=committed[0],
            committed_sequences=committed[1],
            taken_at_s=now_s,
        )


def retry_after_s(queued_tokens: int, prefill_tokens_per_s: float) -> float:
    """Return when a refused request might fit: the time to compute half of the queue."""
    return max(0.1, queued_tokens / prefill_tokens_per_s / 2) if prefill_tokens_per_s > 0.0 else 1.0


_log = logging.getLogger(__name__)


class Outbox:
    """Outputs waiting to be delivered. ``on_first``: called when an output enters an empty box."""

    def __init__(self, on_first: Callable[[], object] = lambda: None) -> None:
        self._on_first = on_first
        self._batches: dict[OutputSink, list[EngineOutput]] = {}

    def add(self, sink: OutputSink, output: EngineOutput) -> None:
        """Add an output."""
        if not self._batches:
            self._on_first()
        self._batches.setdefault(sink, []).append(output)

    def deliver(self) -> None:
        """Empty the box: each sink gets its batch. A failing sink does not affect others."""
        batches, self._batches = self._batches, {}
        for sink, batch in batches.items():
            try:
                sink(batch)
            except Exception:
                _log.exception("an output sink failed for %s", ", ".join(output.request_id for output in batch))
