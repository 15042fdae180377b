"""How busy each replica is: its latest report plus what this router sent there since.

Owns reservations and the numbers policies read, as flat arrays with one row a replica. Nothing is counted twice: a
report contains this router's requests up to the last one that it calls admitted, and only unreleased reservations with
higher numbers are added. Time is passed in.
"""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from router.load.peer_routers import PeerRouters
from router.load.replica_load import ReplicaLoad, clamped
from router.protocol.events import LoadReport

RESERVATION_TTL_S = 120.0
"""After this a reservation ends by itself: the backstop for lost releases."""

_EXPIRED_A_CALL = 64

Floats = npt.NDArray[np.float64]
T = TypeVar("T", bound=np.generic)


class LoadTable:
    """Rows of numbers by replica, in the order of ``replica_ids``. Read the arrays, never write.

    ``queued_tokens``: uncached prompt tokens that wait or are being computed; ``committed_tokens``: those of them that
    nobody overtakes, as those of the first request sent to an idle replica; ``overtakable_tokens``: the others;
    ``falloff``: sequences that the others belong to / overtakable tokens, negated, 0 where there are none; ``waiting``:
    sequences that wait; ``running``: decoding sequences; ``seconds_per_token``: of prefill, decoding considered;
    ``pull_pace``: prefill tokens in the time of one pulled token, infinite where nothing is pulled;
    ``full``: takes no more; ``seeds``: 64-bit hashes of the replica ids, for rendezvous order. ``replicas``: the same
    figures by replica, as plain numbers.
    """

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.num_full = 0
        self.num_pulling = 0
        self._rate_tokens = self._rate_s = 0.0
        self.replica_ids: list[str] = []
        self.replicas: dict[str, ReplicaLoad] = {}
        self._reservations: dict[int, tuple[str, float]] = {}
        self._priced: tuple[float, Floats] | None = None
        self._peers = PeerRouters(router_id)
        self._deadlines: deque[int] = deque()
        self._last_number = 0
        self.queued_tokens: Floats = np.zeros(0)
        self.committed_tokens: Floats = np.zeros(0)
        self.overtakable_tokens: Floats = np.zeros(0)
        self.waiting: Floats = np.zeros(0)
        self.falloff: Floats = np.zeros(0)
        self.running: Floats = np.zeros(0)
        self.seconds_per_token: Floats = np.zeros(0)
        self.pull_pace: Floats = np.zeros(0)
        self.full: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.seeds: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)

    def add_replica(self, replica_id: str) -> None:
        """Start tracking a replica as idle; adding it again changes nothing."""
        if replica_id in self.replicas:
            return
        row = len(self.replica_ids)
        self.replica_ids.append(replica_id)
        replica = self.replicas[replica_id] = ReplicaLoad(row)
        self._resize()
        self.seeds[row] = xxhash.xxh3_64_intdigest(replica_id.encode())
        self._write(replica)

    def remove_replica(self, replica_id: str) -> list[int]:
        """Forget a replica and its reservations, and return their numbers; unknown ids are ignored."""
        replica = self.replicas.pop(replica_id, None)
        if replica is None:
            return []
        self.num_full -= replica.full
        self.num_pulling -= replica.pulls
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
        """Return a replica's row, None when unknown. Rows move when a replica is removed."""
        replica = self.replicas.get(replica_id)
        return None if replica is None else replica.row

    def report(self, replica_id: str, report: LoadReport, now_s: float) -> None:
        """Take a replica's report, unless a later one has come; nonsense (negative, not finite, huge) is clamped.

        Unknown ids are ignored.
        """
        replica = self.replicas.get(replica_id)
        if replica is None:
            return
        clean = clamped(report)
        if replica.report is not None and clean.taken_at_s < replica.report.taken_at_s:
            return
        # To keep: ``admitted`` names every router there ever was, and is read once.
        replica.report = msgspec.structs.replace(clean, admitted={})
        self._count_rate(replica, -1)
        replica.measured(clean)
        self._count_rate(replica, 1)
        replica.reported_at_s = now_s
        self._peers.report(replica_id, clean.admitted, now_s)
        last_admitted = clean.admitted.get(self.router_id, 0)
        if last_admitted > replica.last_admitted:
            # Never beyond what was handed out: a nonsense number would hide every later reservation.
            replica.last_admitted = min(last_admitted, self._last_number)
            for number in [n for n in replica.unreported if n <= replica.last_admitted]:
                replica.unreported_tokens -= replica.unreported.pop(number)
        self._write(replica)

    def disbelieve(self, replica_id: str) -> None:
        """Forget what work a replica has told of, not its pace: from now on only this router's own is counted."""
        replica = self.replicas[replica_id]
        if replica.report is not None:
            replica.report = msgspec.structs.replace(
                replica.report,
                queued_prefill_tokens=0,
                running_sequences=0,
                waiting_sequences=0,
                committed_prefill_tokens=0,
            )
            self._write(replica)

    def reserve(self, replica_id: str, uncached_tokens: int, now_s: float) -> int:
        """Count work as queued at a replica from now on and return the reservation's number, which only rises.

        Raises KeyError for an unknown replica.
        """
        replica = self.replicas[replica_id]
        self._last_number += 1
        number = self._last_number
        self._reservations[number] = replica_id, now_s + RESERVATION_TTL_S
        self._deadlines.append(number)
        replica.unreported[number] = uncached_tokens
        replica.unreported_tokens += uncached_tokens
        self._write_queue(replica)
        return number

    def release(self, number: int) -> None:
        """End a reservation (first token, error or time-out); again is harmless."""
        reservation = self._reservations.pop(number, None)
        if reservation is None:
            return
        replica = self.replicas[reservation[0]]
        tokens = replica.unreported.pop(number, None)
        if tokens is not None:
            replica.unreported_tokens -= tokens
            self._write_queue(replica)

    def expire(self, now_s: float) -> list[int]:
        """End reservations older than ``RESERVATION_TTL_S`` and return their numbers.

        Looks at a bounded number of reservations a call, oldest first.
        """
        ended: list[int] = []
        deadlines, looked_at = self._deadlines, 0
        while deadlines and looked_at < _EXPIRED_A_CALL:
            number = deadlines[0]
            reservation = self._reservations.get(number)
            if reservation is not None:
                if reservation[1] > now_s:
                    break
                self.release(number)
                ended.append(number)
            deadlines.popleft()
            looked_at += 1
        return ended

    @property
    def active_routers(self) -> int:
        """Routers that sent a replica something in the last half minute, this one among them."""
        return self._peers.active

    @property
    def open_reservations(self) -> int:
        """Reservations neither released nor expired."""
        return len(self._reservations)

    def pull_shares(self, price: float) -> Floats:
        """By row, what a pulled token weighs as a part of a computed one; 1 where computing it is no dearer."""
        if self._priced is None or self._priced[0] != price:
            self._priced = price, np.minimum(self.pull_pace * price, 1.0)
        return self._priced[1]

    def is_full(self, replica_id: str) -> bool:
        """Whether a replica's waiting queue is at its bound (unknown replicas are full)."""
        replica = self.replicas.get(replica_id)
        return replica is None or replica.full

    def queue_ahead(self, replica_id: str) -> int:
        """Return the uncached prompt tokens queued at a replica, each counted once (0 when unknown)."""
        replica = self.replicas.get(replica_id)
        return 0 if replica is None else replica.queued_tokens

    def _count_rate(self, replica: ReplicaLoad, sign: int) -> None:
        """Add what a replica's prefill rate was measured over to that of all, or take it away."""
        self._rate_tokens += sign * replica.rate_tokens
        self._rate_s += sign * replica.rate_s

    def _write(self, replica: ReplicaLoad) -> None:
        """Write a row after a report."""
        row, pulled = replica.row, replica.pulls
        replica.apply_report(self._rate_tokens / self._rate_s if self._rate_s > 0.0 else 0.0)
        self.running[row] = replica.running
        self.seconds_per_token[row] = replica.seconds_per_token
        self.pull_pace[row] = replica.pull_pace
        if self._priced is not None:
            price, shares = self._priced
            shares[row] = min(replica.pull_pace * price, 1.0)
        self.num_pulling += replica.pulls - pulled
        self._write_queue(replica)

    def _write_queue(self, replica: ReplicaLoad) -> None:
        """Write what of a row changes with a reservation."""
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
        """Cut the columns to the replicas there are, or lengthen them with zeros."""
        self._priced = None
        rows = len(self.replica_ids)
        self.queued_tokens = _resized(self.queued_tokens, rows)
        self.committed_tokens = _resized(self.committed_tokens, rows)
        self.overtakable_tokens = _resized(self.overtakable_tokens, rows)
        self.waiting = _resized(self.waiting, rows)
        self.falloff = _resized(self.falloff, rows)
        self.running = _resized(self.running, rows)
        self.seconds_per_token = _resized(self.seconds_per_token, rows)
        self.pull_pace = _resized(self.pull_pace, rows)
        self.full = _resized(self.full, rows)
        self.seeds = _resized(self.seeds, rows)


def _resized(column: npt.NDArray[T], rows: int) -> npt.NDArray[T]:
    fresh = np.zeros(rows, dtype=column.dtype)
    kept = column[:rows]
    fresh[: len(kept)] = kept
    return fresh
