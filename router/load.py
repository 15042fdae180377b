"""Each replica's load: its latest report plus the requests that this router has sent since.

The table owns reservations, and the policies' input as flat arrays with one row for each replica. No request counts
twice: a report includes this router's requests up to the last admitted one, and the table adds only unreleased
reservations with higher numbers. Callers pass in the time.

``ReplicaLoad`` is a row of it. ``LoraResidency`` has the adapters in each replica's memory, and the wait for a load
elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice, repeat
from math import inf, isfinite

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from router.protocol.events import LoadReport, adapter_hash, unpack_keys
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

ALIKE = 1.5
"""Rates within this factor of the common one rank as equal, and others by what they differ beyond it. Otherwise the
replica with the quietest neighbours would get all cold prompts while little is queued, and evict what the others have
space for (benchmarks/log/routing.md, 2026-11-27)."""

_RATE_STEP = 1e-3
"""The common rate changes for ``ALIKE`` once it differs by this fraction; then for all replicas at once."""

UNREPORTED = LoadReport(0, 0, 0, 0, 0, 0.0, taken_at_s=-inf)
"""The assumed report before the first one."""


@dataclass(slots=True)
class ReplicaLoad:
    """The clamped report, this router's unreleased reservations, and the derived values, named as in ``LoadTable``.

    ``pull_pace``, ``tier_pace``: prefill tokens in the time of one pulled token, or of one loaded from a tier below the
    pool, which costs at most as much as computing it. ``rate_tokens``, ``rate_s``: the prefill rate's data.
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
    tier_pace: float = 0.0
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
        tier_rate = self.report.tier_tokens_per_s
        self.tier_pace = min(1.0 / (tier_rate * self.seconds_per_token), 1.0) if tier_rate else 0.0

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
        tier_tokens_per_s=rate(report.tier_tokens_per_s),
        prefill_rate_tokens=min(max(report.prefill_rate_tokens, 0), MAX_TOKENS),
        taken_at_s=report.taken_at_s if isfinite(report.taken_at_s) else 0.0,
        attributes={
            name: value
            for name, value in islice(report.attributes.items(), MAX_ATTRIBUTES)
            if (len(value) <= MAX_ATTRIBUTE_CHARS if isinstance(value, str) else isfinite(value))
        },
        out=report.out[:MAX_ATTRIBUTE_CHARS],
    )


class LoraResidency:
    """Replicas by adapter. A replica without a measured load time is assumed to need the others' median."""

    def __init__(self) -> None:
        self._reported: dict[str, tuple[bytes, float]] = {}
        self._holders: dict[bytes, set[str]] = {}
        self._loading_s: dict[str, float] = {}

    def report(self, replica_id: str, report: LoadReport) -> None:
        """Record a known replica's report."""
        said = (report.adapters, report.adapter_load_s)
        if self._reported.get(replica_id, (b"", 0.0)) == said:
            return
        self.forget(replica_id)
        self._reported[replica_id] = said
        for key in unpack_keys(report.adapters):
            self._holders.setdefault(key, set()).add(replica_id)
        if isfinite(report.adapter_load_s) and report.adapter_load_s > 0.0:
            self._loading_s[replica_id] = min(report.adapter_load_s, 600.0)

    def forget(self, replica_id: str) -> None:
        """Forget a replica. Unknown ids are ignored."""
        self._loading_s.pop(replica_id, None)
        packed, _ = self._reported.pop(replica_id, (b"", 0.0))
        for key in set(unpack_keys(packed)):
            self._holders[key].discard(replica_id)
            if not self._holders[key]:
                del self._holders[key]

    def wait_s(self, adapter: str, loads: LoadTable) -> Floats | None:
        """Return by row the wait in seconds for an adapter (its key; "": none), or None when no replica has it."""
        holders = self._holders.get(adapter_hash(adapter)) if adapter else None
        if not holders or not self._loading_s:
            return None
        usual_s = sorted(self._loading_s.values())[len(self._loading_s) // 2]
        names = loads.replica_ids
        waits = np.fromiter(map(self._loading_s.get, names, repeat(usual_s)), np.float64, len(names))
        waits[[row for name in holders if (row := loads.row_of(name)) is not None]] = 0.0
        return waits


RESERVATION_TTL_S = 120.0
"""A reservation ends after this time by itself, in case its release is lost."""

_EXPIRED_A_CALL = 64

ROUTER_ACTIVE_S = 30.0
"""Another router counts as inactive after this many seconds without a request."""

Floats = npt.NDArray[np.float64]


class LoadTable:
    """Arrays with one row for each replica, in the order of ``replica_ids``. Callers must not write to them.

    ``queued_tokens``: uncached prompt tokens that wait or are being computed; ``committed_tokens``: those that no
    request overtakes, such as those of the first request sent to an idle replica; ``overtakable_tokens``: the others;
    ``falloff``: minus the number of sequences with overtakable tokens / overtakable tokens, 0 without any; ``waiting``:
    waiting sequences; ``running``: decoding sequences; ``seconds_per_token``: of prefill, slowed by decoding;
    ``ranked_s``: the same for ranking, equal where rates are ``ALIKE``; ``pull_shares``: the cost of a pulled token
    relative to a computed one, at most 1; ``full``: accepts no more requests; ``seeds``: 64-bit hashes of the replica
    ids, for rendezvous order. ``replicas`` has the same values by replica, as plain numbers.
    """

    queued_tokens: Floats
    committed_tokens: Floats
    overtakable_tokens: Floats
    waiting: Floats
    falloff: Floats
    running: Floats
    seconds_per_token: Floats
    ranked_s: Floats
    pull_shares: Floats
    full: npt.NDArray[np.bool_]
    seeds: npt.NDArray[np.uint64]

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.num_full = 0
        self.num_pulling = self.num_loading = 0
        self.replica_ids: list[str] = []
        self.replicas: dict[str, ReplicaLoad] = {}
        self._rate_tokens = self._rate_s = self._ranked_rate = 0.0
        self._reservations: OrderedDict[int, tuple[str, float]] = OrderedDict()
        self._last_number = 0
        self._peers = PeerRouters(router_id)
        self._resize()

    def add_replica(self, replica_id: str) -> None:
        """Start tracking a replica as idle. Adding it again changes nothing."""
        if replica_id in self.replicas:
            return
        row = len(self.replica_ids)
        self.replica_ids.append(replica_id)
        replica = self.replicas[replica_id] = ReplicaLoad(row)
        self._resize()
        self.seeds[row] = xxhash.xxh3_64_intdigest(replica_id.encode())
        self._write(replica)

    def remove_replica(self, replica_id: str) -> list[int]:
        """Forget a replica and its reservations, and return their numbers. Unknown ids are ignored."""
        replica = self.replicas.pop(replica_id, None)
        if replica is None:
            return []
        self.num_full -= replica.full
        self.num_pulling -= replica.pulls
        self.num_loading -= replica.tier_pace > 0.0
        self._count_rate(replica, -1)
        self._peers.forget(replica_id)
        last_id = self.replica_ids.pop()
        if last_id != replica_id:  # the last row moves into the hole
            moved = self.replicas[last_id]
            moved.row = replica.row
            self.replica_ids[moved.row] = last_id
            self.seeds[moved.row] = xxhash.xxh3_64_intdigest(last_id.encode())
            self._write(moved)
        self._resize()
        ended = [number for number, (name, _) in self._reservations.items() if name == replica_id]
        for number in ended:
            del self._reservations[number]
        return ended

    def row_of(self, replica_id: str) -> int | None:
        """Return a replica's row, or None when unknown. Rows move when a replica is removed."""
        replica = self.replicas.get(replica_id)
        return None if replica is None else replica.row

    def report(self, replica_id: str, report: LoadReport, now_s: float) -> None:
        """Store a known replica's report, clamped to sane bounds, unless a newer one has arrived."""
        replica = self.replicas.get(replica_id)
        if replica is None:
            return
        clean = clamped(report)
        if clean.taken_at_s < replica.report.taken_at_s:
            return
        self._count_rate(replica, -1)
        replica.take(clean)
        self._count_rate(replica, 1)
        replica.reported_at_s = now_s
        self._peers.report(replica_id, report.admitted, now_s)
        last_admitted = report.admitted.get(self.router_id, 0)
        if last_admitted > replica.last_admitted:
            # Never above the last issued number: a nonsense value would hide every later reservation.
            replica.last_admitted = min(last_admitted, self._last_number)
            for number in [n for n in replica.unreported if n <= replica.last_admitted]:
                replica.unreported_tokens -= replica.unreported.pop(number)
        self._write(replica)

    def disbelieve(self, replica_id: str) -> None:
        """Forget a replica's reported work but not its speed, so that only this router's requests count."""
        replica = self.replicas[replica_id]
        work = ("queued_prefill_tokens", "committed_prefill_tokens", "running_sequences", "waiting_sequences")
        replica.report = msgspec.structs.replace(replica.report, **dict.fromkeys(work, 0))
        self._write(replica)

    def reserve(self, replica_id: str, uncached_tokens: int, now_s: float) -> int:
        """Count work as queued at a known replica, and return the reservation's number. Numbers only rise."""
        replica = self.replicas[replica_id]
        self._last_number += 1
        number = self._last_number
        self._reservations[number] = replica_id, now_s + RESERVATION_TTL_S
        replica.unreported[number] = uncached_tokens
        replica.unreported_tokens += uncached_tokens
        self._write_queue(replica)
        return number

    def release(self, number: int) -> None:
        """End a reservation (first token, error or time-out). A repeated call has no effect."""
        self.reported(number)
        self._reservations.pop(number, None)

    def reported(self, number: int) -> None:
        """Stop counting a reservation that its replica's reports now count. A repeated call has no effect."""
        reservation = self._reservations.get(number)
        if reservation is None:
            return
        replica = self.replicas[reservation[0]]
        tokens = replica.unreported.pop(number, None)
        if tokens is not None:
            replica.unreported_tokens -= tokens
            self._write_queue(replica)

    def expire(self, now_s: float) -> list[int]:
        """End reservations older than ``RESERVATION_TTL_S``, a bounded number per call, and return their numbers."""
        ended: list[int] = []
        while self._reservations and len(ended) < _EXPIRED_A_CALL:
            number = next(iter(self._reservations))
            if self._reservations[number][1] > now_s:
                break
            self.release(number)
            ended.append(number)
        return ended

    @property
    def active_routers(self) -> int:
        """The number of routers that sent a request in the last half minute, including this one."""
        return self._peers.active

    @property
    def open_reservations(self) -> int:
        """The number of reservations neither released nor expired."""
        return len(self._reservations)

    def is_full(self, replica_id: str) -> bool:
        """Whether a replica's waiting queue is at its limit. Unknown replicas are full."""
        replica = self.replicas.get(replica_id)
        return replica is None or replica.full

    @property
    def prefill_tokens_per_s(self) -> float:
        """The prefill rate of a replica, measured over all of them; 0.0 while unknown."""
        return self._rate_tokens / self._rate_s if self._rate_s > 0.0 else 0.0

    def queue_ahead(self, replica_id: str) -> int:
        """Return the uncached prompt tokens queued at a replica (0 when unknown)."""
        replica = self.replicas.get(replica_id)
        return 0 if replica is None else replica.queued_tokens

    def _count_rate(self, replica: ReplicaLoad, sign: int) -> None:
        """Add a replica's prefill measurement to the total over all replicas, or subtract it."""
        self._rate_tokens += sign * replica.rate_tokens
        self._rate_s += sign * replica.rate_s

    def _write(self, replica: ReplicaLoad) -> None:
        """Write a row after a report."""
        row, pulled, loaded = replica.row, replica.pulls, replica.tier_pace > 0.0
        common_rate = self.prefill_tokens_per_s
        replica.apply_report(common_rate)
        self.running[row] = replica.running
        self.seconds_per_token[row] = replica.seconds_per_token
        if abs(common_rate - self._ranked_rate) > _RATE_STEP * common_rate:
            self._ranked_rate = common_rate
            self._rank(slice(None))
        else:
            self._rank(slice(row, row + 1))
        self.pull_shares[row] = min(replica.pull_pace * PULL_PRICE, 1.0)
        self.num_pulling += replica.pulls - pulled
        self.num_loading += (replica.tier_pace > 0.0) - loaded
        self._write_queue(replica)

    def _rank(self, rows: slice) -> None:
        """Compute ``ranked_s`` of some rows; all are compared with one common rate."""
        self.ranked_s[rows] = own_s = self.seconds_per_token[rows]
        if self._ranked_rate:
            rates = (1.0 + DECODE_WEIGHT * self.running[rows]) / own_s
            self.ranked_s[rows] *= np.clip(rates / self._ranked_rate, 1.0 / ALIKE, ALIKE)

    def _write_queue(self, replica: ReplicaLoad) -> None:
        """Write the parts of a row that change with a reservation."""
        row, was_full = replica.row, replica.full
        replica.recompute_queue()
        self.queued_tokens[row] = queued = replica.queued_tokens
        self.committed_tokens[row] = committed = replica.committed_tokens
        self.overtakable_tokens[row] = queued - committed
        self.waiting[row] = replica.waiting
        self.falloff[row] = replica.falloff
        self.full[row] = replica.full
        self.num_full += replica.full - was_full

    def _resize(self) -> None:
        """Resize the columns to the number of replicas. New rows are zero."""
        for name in _COLUMNS:
            dtype = {"full": np.bool_, "seeds": np.uint64}.get(name, np.float64)
            column: npt.NDArray[np.generic] = np.zeros(len(self.replica_ids), dtype)
            kept = getattr(self, name, column)[: len(column)]
            column[: len(kept)] = kept
            setattr(self, name, column)


_COLUMNS = tuple(LoadTable.__annotations__)


class PeerRouters:
    """The number of recently active routers, including this one, from load reports."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.active = 1
        self._admitted: dict[str, Mapping[str, int]] = {}
        self._active_at_s: dict[str, float] = {}
        self._looked_at_s = 0.0

    def report(self, replica_id: str, admitted: Mapping[str, int], now_s: float) -> None:
        """Read a replica's report. A router with a higher reservation number than before is active."""
        before = self._admitted.get(replica_id, {})
        self._admitted[replica_id] = admitted
        for name, number in admitted.items():
            if number > before.get(name, 0):
                self._active_at_s[name] = now_s
        if now_s - self._looked_at_s > 1.0:
            self._looked_at_s = now_s
            for name in [name for name, at_s in self._active_at_s.items() if now_s - at_s > ROUTER_ACTIVE_S]:
                del self._active_at_s[name]
        self.active = len(self._active_at_s) + (self.router_id not in self._active_at_s)

    def forget(self, replica_id: str) -> None:
        """Forget a replica that left."""
        self._admitted.pop(replica_id, None)
