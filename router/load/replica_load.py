"""One replica's load: its latest report, within sane bounds, and what this router sent there since.

A router decides more often than a replica reports, so two methods divide the work. Tokens, sequences, seconds a token.
"""

from dataclasses import dataclass, field
from math import inf, isfinite

import msgspec

from router.protocol.events import LoadReport

DEFAULT_PREFILL_TOKENS_PER_S = 5000.0
"""Holds until some replica has measured its own rate."""

DECODE_WEIGHT = 0.01
"""How much each running sequence slows prefill, as a share of it."""

PULL_PRICE = 2.0
"""Seconds that a second of pulling weighs: a copy takes room from other prefixes and the link from other pulls."""

MAX_TOKENS = 1 << 40
MAX_SEQUENCES = 1 << 20
MAX_RATE = 1e9

ENOUGH_RATE_TOKENS = 8192
"""A prefill rate measured over this many tokens is believed. Of one measured over fewer, what is missing is taken at
the rate of all replicas together: a warm-up of 1,024 tokens beside other work may find a tenth of the true rate, and
a replica believed to be slow gets no work that would correct it."""

UNREPORTED = LoadReport(0, 0, 0, 0, 0, 0.0, taken_at_s=-inf)
"""What holds before the first report."""


@dataclass(slots=True)
class ReplicaLoad:
    """The clamped report, this router's unreleased reservations, and what follows from both, by ``LoadTable``'s names.

    ``pull_pace``: prefill tokens in the time of one pulled token. ``rate_tokens``, ``rate_s``: behind the prefill rate.
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
        """Take a clamped report, and note what its prefill rate was measured over."""
        self.report = report
        rate, tokens = report.prefill_tokens_per_s, report.prefill_rate_tokens or ENOUGH_RATE_TOKENS
        self.rate_tokens = float(min(tokens, ENOUGH_RATE_TOKENS)) if rate else 0.0
        self.rate_s = self.rate_tokens / rate if rate else 0.0

    def apply_report(self, common_rate: float) -> None:
        """Work out what only a report changes. ``common_rate``: of all replicas together, in tokens/s; 0.0: unknown."""
        rate, pull_rate = self.report.prefill_tokens_per_s, self.report.pull_tokens_per_s
        missing_tokens = ENOUGH_RATE_TOKENS - self.rate_tokens
        if rate and missing_tokens and common_rate:
            rate = ENOUGH_RATE_TOKENS / (self.rate_s + missing_tokens / common_rate)
        self.running = self.report.running_sequences
        self.seconds_per_token = seconds_per_token(rate, self.running)
        self.pull_pace = 1.0 / (pull_rate * self.seconds_per_token) if pull_rate else inf
        self.pulls = bool(pull_rate)

    def recompute_queue(self) -> None:
        """Work out the queue from the report and the unreported reservations."""
        report = self.report
        self.queued_tokens = queued = report.queued_prefill_tokens + self.unreported_tokens
        self.waiting = waiting = report.waiting_sequences + len(self.unreported)
        committed, settled = report.committed_prefill_tokens, report.committed_sequences
        if not report.queued_prefill_tokens and self.unreported:
            # Where nothing waited the first one begins as it arrives, and nobody overtakes it any more.
            committed, settled = next(iter(self.unreported.values())), 1
        self.committed_tokens = committed = committed if committed < queued else queued
        others = queued - committed
        # At least one sequence has them.
        self.falloff = -max(waiting - settled if committed else waiting, 1) / others if others else 0.0
        most_waiting = report.max_waiting_sequences
        room = report.max_running_sequences + most_waiting
        self.full = 0 < most_waiting <= report.waiting_sequences or 0 < room <= self.running + waiting


def seconds_per_token(prefill_tokens_per_s: float, running: float) -> float:
    """Return how long a replica takes for a token of prefill. ``prefill_tokens_per_s``: 0.0 while unknown."""
    return (1.0 + DECODE_WEIGHT * running) / (prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S)


def clamped(report: LoadReport) -> LoadReport:
    """Return a report without nonsense (negative, not finite, huge), and without ``admitted``, which is read once."""

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
    )
