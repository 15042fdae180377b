"""How busy each replica is: its latest report plus what this router sent there since.

Owns reservations and the numbers policies read, as flat arrays with one row a replica. Knows nothing of caches or
of how reports arrive. Nothing is counted twice: a report contains this router's requests up to
``RouterShare.last_reservation``; only unreleased reservations with higher numbers are added. Time is passed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import isfinite
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from router.events import LoadReport
from router.routers_beside import RoutersBeside

MAX_TOKENS = 1 << 40
MAX_SEQUENCES = 1 << 20
MAX_RATE = 1e9
_EXPIRED_A_CALL = 64

Floats = npt.NDArray[np.float64]
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """``default_prefill_tokens_per_s`` holds until a replica has measured its own rate.

    ``default_pull_tokens_per_s``: how fast a replica copies KV that says nothing of it; 0: it does not.

    ``decode_weight``: how much each running sequence slows prefill, as a share of it.
    """

    default_prefill_tokens_per_s: float = 5000.0
    default_pull_tokens_per_s: float = 0.0
    decode_weight: float = 0.01
    reservation_ttl_s: float = 120.0


@dataclass(slots=True)
class _Reservation:
    replica_id: str
    uncached_tokens: int
    deadline_s: float


@dataclass(slots=True)
class ReplicaLoad:
    """One replica: the clamped report and this router's unreleased reservations."""

    row: int
    report: LoadReport | None = None
    reported_at_s: float = 0.0
    last_admitted: int = 0
    unreported: dict[int, int] = field(default_factory=dict)
    unreported_tokens: int = 0
    full: bool = False
    pulls: bool = False


class LoadTable:
    """Rows of numbers by replica. The arrays are views of the first ``len(replica_ids)`` rows; read, never write.

    ``queued_tokens``: uncached prompt tokens that wait or are being computed; ``committed_tokens``: those of them that
    nobody overtakes, ``overtakable_tokens``: the others; ``jobs``: the sequences that the others belong to, at least
    one where there are any; ``falloff``: jobs / overtakable tokens, negated, 0 where there are none; ``waiting``:
    sequences that wait; ``running``: decoding sequences; ``seconds_per_token``: of prefill, decoding considered;
    ``pull_pace``: prefill tokens in the time of one pulled token, infinite where nothing is pulled;
    ``full``: takes no more; ``seeds``: 64-bit hashes of the replica ids, for rendezvous order.
    """

    def __init__(self, router_id: str, settings: LoadSettings | None = None) -> None:
        self.router_id = router_id
        self.settings = settings or LoadSettings()
        self.clamped_reports = 0
        self.expired_reservations = 0
        self.num_full = 0
        self.num_pulling = 0
        self._num_unreported = 0
        self.replica_ids: list[str] = []
        self._replicas: dict[str, ReplicaLoad] = {}
        self._reservations: dict[int, _Reservation] = {}
        self._routers = RoutersBeside(router_id)
        self._deadlines: deque[int] = deque()
        self._last_number = 0
        self._grow(8)

    def add_replica(self, replica_id: str) -> None:
        """Start tracking a replica as idle; adding it again changes nothing."""
        if replica_id in self._replicas:
            return
        row = len(self.replica_ids)
        if row == len(self._queued):
            self._grow(2 * row)
        self.replica_ids.append(replica_id)
        replica = self._replicas[replica_id] = ReplicaLoad(row)
        self._seeds[row] = xxhash.xxh3_64_intdigest(replica_id.encode())
        self._cut_views()
        self._write(replica)

    def remove_replica(self, replica_id: str) -> list[int]:
        """Forget a replica and its reservations, and return their numbers; unknown ids are ignored."""
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return []
        self.num_full -= replica.full
        self.num_pulling -= replica.pulls
        self._num_unreported -= len(replica.unreported)
        self._routers.forget(replica_id)
        last_id = self.replica_ids.pop()
        if last_id != replica_id:  # the last row moves into the hole
            moved = self._replicas[last_id]
            moved.row = replica.row
            self.replica_ids[moved.row] = last_id
            self._seeds[moved.row] = xxhash.xxh3_64_intdigest(last_id.encode())
            self._write(moved)
        self._cut_views()
        ended = [number for number, r in self._reservations.items() if r.replica_id == replica_id]
        for number in ended:
            del self._reservations[number]
        return ended

    def row_of(self, replica_id: str) -> int | None:
        """Return a replica's row, None when unknown. Rows move when a replica is removed."""
        replica = self._replicas.get(replica_id)
        return None if replica is None else replica.row

    def replica(self, replica_id: str) -> ReplicaLoad | None:
        """Return what is known of a replica, for display."""
        return self._replicas.get(replica_id)

    def report(self, replica_id: str, report: LoadReport, now_s: float) -> None:
        """Take a replica's report; unknown ids are ignored.

        Nonsense (negative, not finite, huge) is clamped and counted in ``clamped_reports``.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        clean = _clamped(report)
        if clean != report:
            self.clamped_reports += 1
        replica.report = msgspec.structs.replace(clean, shares=())  # read below; they name every router there ever was
        replica.reported_at_s = now_s
        self._routers.report(replica_id, clean.shares, now_s)
        share = next((share for share in clean.shares if share.router_id == self.router_id), None)
        if share is not None and share.last_reservation > replica.last_admitted:
            # Never beyond what was handed out: a nonsense number would hide every later reservation.
            replica.last_admitted = min(share.last_reservation, self._last_number)
            for number in [n for n in replica.unreported if n <= replica.last_admitted]:
                replica.unreported_tokens -= replica.unreported.pop(number)
                self._num_unreported -= 1
        self._write(replica)

    def reserve(self, replica_id: str, uncached_tokens: int, now_s: float) -> int:
        """Count work as queued at a replica from now on and return the reservation's number, which only rises.

        Raises KeyError for an unknown replica.
        """
        replica = self._replicas[replica_id]
        self._routers.decided(self._num_unreported)
        self._num_unreported += 1
        self._last_number += 1
        number = self._last_number
        self._reservations[number] = _Reservation(replica_id, uncached_tokens, now_s + self.settings.reservation_ttl_s)
        self._deadlines.append(number)
        replica.unreported[number] = uncached_tokens
        replica.unreported_tokens += uncached_tokens
        self._write(replica)
        return number

    def release(self, number: int) -> bool:
        """End a reservation (first token, error or time-out); False when it had ended already."""
        reservation = self._reservations.pop(number, None)
        if reservation is None:
            return False
        replica = self._replicas[reservation.replica_id]
        tokens = replica.unreported.pop(number, None)
        if tokens is not None:
            self._num_unreported -= 1
            replica.unreported_tokens -= tokens
            self._write(replica)
        return True

    def expire(self, now_s: float) -> list[int]:
        """End reservations older than the TTL, count them and return their numbers; the backstop for lost releases.

        Looks at a bounded number of reservations a call, oldest first.
        """
        ended: list[int] = []
        if not self._deadlines:
            return ended
        for _ in range(min(len(self._deadlines), _EXPIRED_A_CALL)):
            number = self._deadlines[0]
            reservation = self._reservations.get(number)
            if reservation is not None:
                if reservation.deadline_s > now_s:
                    break
                self.release(number)
                ended.append(number)
            self._deadlines.popleft()
        self.expired_reservations += len(ended)
        return ended

    @property
    def active_routers(self) -> int:
        """Routers that sent a replica something in the last half minute, this one among them."""
        return self._routers.active

    @property
    def apart(self) -> Floats | None:
        """By row, how much this router leaves a replica to others that decide at the same moment: 0 to 1; None: all 0.

        See ``RoutersBeside``.
        """
        return self._routers.apart(self.replica_ids)

    @property
    def open_reservations(self) -> int:
        """Reservations neither released nor expired."""
        return len(self._reservations)

    def is_full(self, replica_id: str) -> bool:
        """Whether a replica's waiting queue is at its bound (unknown replicas are full)."""
        row = self.row_of(replica_id)
        return row is None or bool(self.full[row])

    def queue_ahead(self, replica_id: str) -> int:
        """Return the uncached prompt tokens queued at a replica, each counted once (0 when unknown)."""
        row = self.row_of(replica_id)
        return 0 if row is None else int(self.queued_tokens[row])

    def _write(self, replica: ReplicaLoad) -> None:
        row, report, sent = replica.row, replica.report, len(replica.unreported)
        queued, waiting = replica.unreported_tokens, sent
        running, rate, full = 0, 0.0, False
        pull_rate = self.settings.default_pull_tokens_per_s
        if report is not None:
            pull_rate = report.pull_tokens_per_s or pull_rate
            queued += report.queued_prefill_tokens
            waiting += report.waiting_sequences
            running, rate = report.running_sequences, report.prefill_tokens_per_s
            room = report.max_running_sequences + report.max_waiting_sequences
            full = 0 < report.max_waiting_sequences <= report.waiting_sequences or 0 < room <= running + waiting
        committed = min(report.committed_prefill_tokens, queued) if report is not None else 0
        others = queued - committed
        settled = report.committed_sequences if report is not None and committed else 0
        jobs = max(waiting - settled, 1) if others else 0
        self._queued[row] = queued
        self._committed[row] = committed
        self._overtakable[row] = others
        self._waiting[row] = waiting
        self._jobs[row] = jobs
        self._falloff[row] = -jobs / others if others else 0.0
        self._running[row] = running
        self._pace[row] = (1.0 + self.settings.decode_weight * running) / (
            rate or self.settings.default_prefill_tokens_per_s
        )
        self._pull_pace[row] = 1.0 / (pull_rate * self._pace[row]) if pull_rate else np.inf
        if replica.pulls != bool(pull_rate):
            replica.pulls = bool(pull_rate)
            self.num_pulling += 1 if pull_rate else -1
        if full != replica.full:
            replica.full = full
            self.num_full += 1 if full else -1
        self._full[row] = full

    def _grow(self, rows: int) -> None:
        old = len(self.replica_ids)
        self._queued = _longer(self.queued_tokens if old else None, rows, np.float64)
        self._committed = _longer(self.committed_tokens if old else None, rows, np.float64)
        self._overtakable = _longer(self.overtakable_tokens if old else None, rows, np.float64)
        self._waiting = _longer(self.waiting if old else None, rows, np.float64)
        self._jobs = _longer(self.jobs if old else None, rows, np.float64)
        self._falloff = _longer(self.falloff if old else None, rows, np.float64)
        self._running = _longer(self.running if old else None, rows, np.float64)
        self._pace = _longer(self.seconds_per_token if old else None, rows, np.float64)
        self._pull_pace = _longer(self.pull_pace if old else None, rows, np.float64)
        self._full = _longer(self.full if old else None, rows, np.bool_)
        self._seeds = _longer(self.seeds if old else None, rows, np.uint64)
        self._cut_views()

    def _cut_views(self) -> None:
        rows = len(self.replica_ids)
        self.queued_tokens: Floats = self._queued[:rows]
        self.committed_tokens: Floats = self._committed[:rows]
        self.overtakable_tokens: Floats = self._overtakable[:rows]
        self.waiting: Floats = self._waiting[:rows]
        self.jobs: Floats = self._jobs[:rows]
        self.falloff: Floats = self._falloff[:rows]
        self.running: Floats = self._running[:rows]
        self.seconds_per_token: Floats = self._pace[:rows]
        self.pull_pace: Floats = self._pull_pace[:rows]
        self.full: npt.NDArray[np.bool_] = self._full[:rows]
        self.seeds: npt.NDArray[np.uint64] = self._seeds[:rows]


def _longer(column: npt.NDArray[T] | None, rows: int, dtype: type[T]) -> npt.NDArray[T]:
    """Return a column of ``rows`` zeros that begins with ``column``."""
    fresh = np.zeros(rows, dtype=dtype)
    if column is not None:
        fresh[: len(column)] = column
    return fresh


def _clamped(report: LoadReport) -> LoadReport:
    rate, step, pull_rate = report.prefill_tokens_per_s, report.decode_step_s, report.pull_tokens_per_s
    return LoadReport(
        queued_prefill_tokens=min(max(report.queued_prefill_tokens, 0), MAX_TOKENS),
        running_sequences=min(max(report.running_sequences, 0), MAX_SEQUENCES),
        waiting_sequences=min(max(report.waiting_sequences, 0), MAX_SEQUENCES),
        max_running_sequences=min(max(report.max_running_sequences, 0), MAX_SEQUENCES),
        max_waiting_sequences=min(max(report.max_waiting_sequences, 0), MAX_SEQUENCES),
        prefill_tokens_per_s=min(rate, MAX_RATE) if isfinite(rate) and rate >= 1e-3 else 0.0,
        decode_step_s=min(step, 3600.0) if isfinite(step) and step > 0.0 else 0.0,
        shares=report.shares,
        committed_prefill_tokens=min(max(report.committed_prefill_tokens, 0), MAX_TOKENS),
        committed_sequences=min(max(report.committed_sequences, 0), MAX_SEQUENCES),
        pull_tokens_per_s=min(pull_rate, MAX_RATE) if isfinite(pull_rate) and pull_rate >= 1e-3 else 0.0,
        adapters=report.adapters,
        adapter_load_s=report.adapter_load_s,
    )
