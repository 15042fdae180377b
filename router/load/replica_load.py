"""One replica's load: its latest report, clamped to sane bounds, plus the requests that this router has sent since.

A router decides more often than a replica reports, so ``apply_report`` and ``recompute_queue`` divide the work.
"""

from dataclasses import dataclass, field
from itertools import islice
from math import inf, isfinite

import msgspec

from router.protocol.events import LoadReport
from router.settings import MAX_ATTRIBUTES

DEFAULT_PREFILL_TOKENS_PER_S = 5000.0
"""Applies until a replica has measured its own rate."""

DECODE_WEIGHT = 0.01
"""The slowdown of prefill by each running sequence, as a fraction."""

PULL_PRICE = 1.4
"""The cost of a second of pulling, in seconds: a copy takes space from other prefixes and the link from other pulls.
More makes a hot prefix's requests wait, less copies more for nothing (benchmarks/log/routing.md, 2026-11-27)."""

MAX_TOKENS = 1 << 40
MAX_SEQUENCES = 1 << 20
MAX_RATE = 1e9
MAX_ATTRIBUTE_CHARS = 256

ENOUGH_RATE_TOKENS = 8192
"""The router trusts a prefill rate measured over this many tokens. For fewer, it fills in the missing tokens at the
common rate of all replicas. A warm-up of 1,024 tokens beside other work may measure a tenth of the true rate, and a
replica that looks slow would get no work to correct it."""

UNREPORTED = LoadReport(0, 0, 0, 0, 0, 0.0, taken_at_s=-inf)
"""The assumed report before the first one."""


@dataclass(slots=True)
class ReplicaLoad:
    """The clamped report, this router's unreleased reservations, and the derived values, named as in ``LoadTable``.

    ``pull_pace``: prefill tokens in the time of one pulled token. ``rate_tokens``, ``rate_s``: the prefill rate's data.
    """

    row: int
    report: LoadReport = UNREPORTED
    reported_at_s: float | None = None
    last_admitted: int = 0
    unreported: dict[int, int] = field(default_factory=dict)
    unreported_tokens: int = 0
    running: int = 0
    seconds_per_token: float = 0.0
    pull_pace: float = inf
    pulls: bool = False
    rate_tokens: float = 0.0
    rate_s: float = 0.0
    queued_tokens: int = 0
    committed_tokens: int = 0
    waiting: int = 0
    falloff: float = 0.0
    full: bool = False

    def take(self, report: LoadReport) -> None:
        """Store a clamped report and the tokens and time behind its prefill rate."""
        self.report = report
        rate, tokens = report.prefill_tokens_per_s, report.prefill_rate_tokens or ENOUGH_RATE_TOKENS
        self.rate_tokens = float(min(tokens, ENOUGH_RATE_TOKENS)) if rate else 0.0
        self.rate_s = self.rate_tokens / rate if rate else 0.0

    def apply_report(self, common_rate: float) -> None:
        """Compute the values that only a report changes. ``common_rate``: of all replicas in tokens/s; 0.0: unknown."""
        rate, pull_rate = self.report.prefill_tokens_per_s, self.report.pull_tokens_per_s
        missing_tokens = ENOUGH_RATE_TOKENS - self.rate_tokens
        if rate and missing_tokens and common_rate:
            rate = ENOUGH_RATE_TOKENS / (self.rate_s + missing_tokens / common_rate)
        self.running = self.report.running_sequences
        self.seconds_per_token = seconds_per_token(rate, self.running)
        self.pull_pace = 1.0 / (pull_rate * self.seconds_per_token) if pull_rate else inf
        self.pulls = bool(pull_rate)

    def recompute_queue(self) -> None:
        """Compute the queue from the report and the unreported reservations."""
        report = self.report
        self.queued_tokens = queued = report.queued_prefill_tokens + self.unreported_tokens
        self.waiting = waiting = report.waiting_sequences + len(self.unreported)
        committed, settled = report.committed_prefill_tokens, report.committed_sequences
        if not report.queued_prefill_tokens and self.unreported:
            # On an idle replica the first request begins on arrival, and no other overtakes it.
            committed, settled = next(iter(self.unreported.values())), 1
        self.committed_tokens = committed = committed if committed < queued else queued
        others = queued - committed
        # At least one sequence has these tokens.
        self.falloff = -max(waiting - settled if committed else waiting, 1) / others if others else 0.0
        most_waiting = report.max_waiting_sequences
        room = report.max_running_sequences + most_waiting
        self.full = 0 < most_waiting <= report.waiting_sequences or 0 < room <= self.running + waiting


def seconds_per_token(prefill_tokens_per_s: float, running: float) -> float:
    """Return a replica's prefill time per token. ``prefill_tokens_per_s``: 0.0 while unknown."""
    return (1.0 + DECODE_WEIGHT * running) / (prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S)


def clamped(report: LoadReport) -> LoadReport:
    """Return a report with negative, non-finite and huge values replaced, and without ``admitted`` (read only once)."""

    def rate(value: float) -> float:
        return min(value, MAX_RATE) if isfinite(value) and value >= 1e-3 else 0.0

    return msgspec.structs.replace(
        report,
        admitted={},
        queued_prefill_tokens=min(max(report.queued_prefill_tokens, 0), MAX_TOKENS),
        running_sequences=min(max(report.running_sequences, 0), MAX_SEQUENCES),
        waiting_sequences=min(max(report.waiting_sequences, 0), MAX_SEQUENCES),
        max_running_sequences=min(max(report.max_running_sequences, 0), MAX_SEQUENCES),
        max_waiting_sequences=min(max(report.max_waiting_sequences, 0), MAX_SEQUENCES),
        prefill_tokens_per_s=rate(report.prefill_tokens_per_s),
        committed_prefill_tokens=min(max(report.committed_prefill_tokens, 0), MAX_TOKENS),
        committed_sequences=min(max(report.committed_sequences, 0), MAX_SEQUENCES),
        pull_tokens_per_s=rate(report.pull_tokens_per_s),
        prefill_rate_tokens=min(max(report.prefill_rate_tokens, 0), MAX_TOKENS),
        taken_at_s=report.taken_at_s if isfinite(report.taken_at_s) else 0.0,
        attributes={
            name: value
            for name, value in islice(report.attributes.items(), MAX_ATTRIBUTES)
            if (len(value) <= MAX_ATTRIBUTE_CHARS if isinstance(value, str) else isfinite(value))
        },
    )
