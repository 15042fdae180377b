"""The product's policies over simulated replicas: loads as the columns that policies read, pools as matches.

One router that always knows the present state: what several routers do not know of each other is not simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import xxhash

from router.candidates import TIE_TOLERANCE, Candidate, RoutingView, estimate
from router.load import PULL_PRICE, LoadTable, ReplicaLoad, seconds_per_token
from router.policies import POLICIES
from router.protocol.request import RoutedRequest
from router.settings import PolicySettings
from serve_app.replay.pool import Holders
from serve_app.replay.replica import ReplayJob, ReplayReplica
from serve_app.replay.setup import Setup

MASKS_KEPT = 50_000
QUEUE_COLUMNS = ("queued_tokens", "committed_tokens", "overtakable_tokens", "falloff")
"""Columns that are made when a policy reads them: few do."""


class ReplayDecision(NamedTuple):
    """The chosen replica, the blocks it was expected to have and to pull, from whom, and its first token's seconds."""

    replica: ReplayReplica
    predicted_blocks: int
    pulled_blocks: int
    pulled_from: ReplayReplica | None
    own_s: float
    estimated_ttft_s: float
    best_blocks: int


class ModelledLoads(LoadTable):
    """A load table that is written from simulated replicas, without reports."""

    def __init__(self, replicas: Sequence[ReplayReplica], setup: Setup) -> None:
        self.router_id, self.num_full, self.num_loading = "replay", 0, 0
        self.sources = list(replicas)
        self.replica_ids = [replica.name for replica in replicas]
        self.replicas = {name: ReplicaLoad(row) for row, name in enumerate(self.replica_ids)}
        rows = len(self.replica_ids)
        self.waiting, self.running = np.zeros((2, rows))
        self.seconds_per_token = np.full(rows, 1.0 / setup.rates.prefill_tokens_per_s)
        self.full = np.zeros(rows, np.bool_)
        self.seeds = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in self.replica_ids], np.uint64)
        pull = setup.rates.pull_tokens_per_s
        self.num_pulling = rows if pull else 0
        self.pull_shares = np.ones(rows)
        for each in self.replicas.values():
            each.pulls, each.seconds_per_token = bool(pull), 1.0 / setup.rates.prefill_tokens_per_s
        self._rate = setup.rates.prefill_tokens_per_s
        self._shortest_first = setup.shortest_first
        self._base, self._begun_s, self._per_s, self._most, self._step, self._least = np.zeros((6, rows))
        self._modulus = np.ones(rows)
        self._dirty = set(self.replica_ids)
        self._unwritten = set(self.replica_ids)
        self._now_s = 0.0
        self.ranked_s = self.seconds_per_token

    def changed(self, replica: ReplayReplica) -> None:
        """Note that a replica's work is another than before."""
        self._dirty.add(replica.name)

    def refresh(self, now_s: float) -> None:
        """Write what every replica does as of now; its queue only where a policy reads that."""
        self._now_s = now_s
        values = self.__dict__
        for column in QUEUE_COLUMNS:
            values.pop(column, None)
        dirty, unwritten = self._dirty, self._unwritten
        while dirty:
            name = dirty.pop()
            load = self.replicas.get(name)
            if load is None:
                continue
            unwritten.add(name)
            row, source = load.row, self.sources[load.row]
            running = source.running
            self.waiting[row] = source.waiting
            if running != load.running:
                load.running = running
                self.running[row] = running
                load.seconds_per_token = per_token = seconds_per_token(self._rate, running)
                self.seconds_per_token[row] = per_token
            if load.pulls:
                pull_rate = source.pulls.tokens_per_s(now_s)
                load.pull_pace = 1.0 / (pull_rate * load.seconds_per_token)
                self.pull_shares[row] = min(load.pull_pace * PULL_PRICE, 1.0)

    def __getattr__(self, name: str) -> Any:
        if name not in QUEUE_COLUMNS:
            raise AttributeError(name)
        self._write_queues()
        return self.__dict__[name]

    def _write_queues(self) -> None:
        """Write the columns of queues: of the replicas that changed, and how far all have come since."""
        for name in self._unwritten:
            row = self.replicas[name].row
            self._base[row], self._begun_s[row], self._per_s[row], self._most[row], step = self.sources[row].progress()
            self._step[row], self._modulus[row], self._least[row] = step, step or 1, 1.0 if step else 0.0
        self._unwritten.clear()
        done = (self._now_s - self._begun_s) * self._per_s
        np.minimum(done, self._most, done)
        done = np.floor(done / self._modulus + 1e-9) * self._modulus  # engines report as of their last step
        queued = np.maximum(self._base - done, self._least)
        committed = np.minimum(queued, self._step) if self._shortest_first else queued
        self.queued_tokens, self.committed_tokens = queued, committed
        self.overtakable_tokens = others = queued - committed
        jobs = np.maximum(self.waiting - (committed > 0.0), 1.0)
        self.falloff = np.divide(-jobs, others, out=np.zeros(len(others)), where=others > 0.0)

    def written(self, replica_id: str) -> None:
        """Write a replica's queue to its plain numbers, which estimates read: as its columns have it."""
        load = self.replicas[replica_id]
        source = self.sources[load.row]
        load.queued_tokens, load.committed_tokens = queued, committed = source.load(self._now_s)
        load.waiting, others = source.waiting, queued - committed
        load.falloff = -max(load.waiting - (committed > 0), 1) / others if others > 0 else 0.0


class ReplayRouter:
    """Chooses replicas for jobs with a policy of the product. ``sizes``: blocks by segment."""

    def __init__(self, setup: Setup, sizes: Sequence[int], holders: Holders, block_tokens: int, seed: int) -> None:
        self._setup, self._sizes, self._holders, self._size = setup, sizes, holders, block_tokens
        self._rank = POLICIES[setup.policy].rank
        self._rng = Random(f"replay {seed}")  # noqa: S311 (a simulation)
        self._turn = 0
        self._scoring = PolicySettings(shortest_first=setup.shortest_first)
        self._names: dict[int, str] = {}
        self._of_mask: dict[int, tuple[str, ...]] = {}
        self._rows: dict[str, ReplayReplica] = {}
        self._pending: dict[tuple[int, int], int] = {}
        """By segment and bit of a replica: the prompts with it that the replica has not computed yet."""
        self._pending_masks: dict[int, int] = {}
        self.loads = ModelledLoads((), setup)

    def replicas(self, replicas: Sequence[ReplayReplica]) -> None:
        """Use these from now on."""
        self.loads = ModelledLoads(replicas, self._setup)
        self._rows = {replica.name: replica for replica in replicas}
        self._names = {replica.pool.bit: replica.name for replica in replicas}
        self._of_mask.clear()

    def matches(self, path: Sequence[int], limit_blocks: int) -> dict[str, int]:
        """Return the tokens of a prompt's beginning by the name of each replica that holds some."""
        found: dict[str, int] = {}
        if not limit_blocks:
            return found
        whole, some, sizes = self._holders.whole, self._holders.some, self._sizes
        blocks, mask = 0, -1
        parts_found: list[tuple[str, int]] = []
        for segment in path:
            here = whole.get(segment, 0) & mask
            parts = some.get(segment)
            if parts:
                parts_found += [
                    (self._names[bit], min(blocks + count, limit_blocks) * self._size)
                    for bit, count in parts.items()
                    if bit & mask and bit in self._names
                ]
            if mask != -1 and (gone := mask & ~here) and blocks:
                found.update(dict.fromkeys(self._named(gone), min(blocks, limit_blocks) * self._size))
            mask = here
            if not mask:
                break
            blocks += sizes[segment]
        if mask > 0 and blocks:
            found.update(dict.fromkeys(self._named(mask), min(blocks, limit_blocks) * self._size))
        for name, count in parts_found:
            found[name] = max(found.get(name, 0), count)
        return found

    def _named(self, mask: int) -> tuple[str, ...]:
        """Return the names of the replicas of a mask that take requests."""
        names = self._of_mask.get(mask)
        if names is None:
            if len(self._of_mask) > MASKS_KEPT:
                self._of_mask.clear()
            names = self._of_mask[mask] = tuple(name for bit, name in self._names.items() if bit & mask)
        return names

    def _in_flight(self, path: Sequence[int], limit_blocks: int) -> dict[str, int]:
        """Return by replica the tokens that prefills under way will have cached, where they are more than it holds.

        One of those with the most is among them in any case.
        """
        found: dict[str, int] = {}
        whole, size, blocks, mask, deepest = self._holders.whole, self._size, 0, -1, 0
        for segment in path:
            under_way = self._pending_masks.get(segment, 0) & mask
            if not under_way:
                break
            mask = deepest = under_way
            blocks = min(blocks + self._sizes[segment], limit_blocks)
            lacking = mask & ~whole.get(segment, 0)
            while lacking:
                bit = lacking & -lacking
                lacking ^= bit
                if bit in self._names:
                    found[self._names[bit]] = blocks * size
        name = self._names.get(deepest & -deepest)
        if name is not None and blocks:
            found.setdefault(name, blocks * size)
        return found

    def decide(self, job: ReplayJob, now_s: float) -> ReplayDecision:
        """Choose a replica. There has to be one."""
        loads = self.loads
        loads.refresh(now_s)
        self._turn += 1
        path = job.path
        match = self.matches(path, job.limit_blocks)
        pending = self._in_flight(path, job.limit_blocks) if self._pending else {}
        for name in pending:
            loads.written(name)
        request = RoutedRequest(
            "", b"", job.prompt_tokens, (path[1 if len(path) > 1 else 0] if path else job.number).to_bytes(8, "little")
        )
        view = RoutingView(
            request, match, loads, self._turn, self._rng, self._scoring, (),
            pending, None, None, now_s,
        )  # fmt: skip
        chosen = self._chosen(job, view)
        loads.written(chosen)
        expected = estimate(view, chosen)
        per_token = loads.replicas[chosen].seconds_per_token
        replica = self._rows[chosen]
        return ReplayDecision(
            replica,
            expected.cached_tokens // self._size,
            expected.pull_tokens // self._size,
            self._rows.get(expected.pull_from),
            expected.uncached_tokens * per_token,
            expected.estimated_ttft_s,
            view.best_tokens // self._size,
        )

    def _chosen(self, job: ReplayJob, view: RoutingView) -> str:
        """Return the policy's choice, among equal ones that of a recorded run: there chance decided."""
        if not self._setup.served_by:
            return self._rank(view, 1)[0].replica_id
        ranked = self._rank(view, None)
        wanted = f"replica-{self._setup.served_by[job.number]}"
        return next(
            (one for one in ranked if one.replica_id == wanted and _equal(one, ranked[0], view)), ranked[0]
        ).replica_id

    def begun(self, job: ReplayJob, replica: ReplayReplica) -> None:
        """Note that a replica will compute a prompt."""
        bit, masks = replica.pool.bit, self._pending_masks
        for segment in job.path:
            key = segment, bit
            before = self._pending.get(key, 0)
            self._pending[key] = before + 1
            if not before:
                masks[segment] = masks.get(segment, 0) | bit

    def computed(self, job: ReplayJob, replica: ReplayReplica) -> None:
        """Note that it has."""
        bit, masks = replica.pool.bit, self._pending_masks
        for segment in job.path:
            key = segment, bit
            left = self._pending[key] - 1
            if left:
                self._pending[key] = left
                continue
            del self._pending[key]
            masks[segment] ^= bit
            if not masks[segment]:
                del masks[segment]


def _equal(one: Candidate, first: Candidate, view: RoutingView) -> bool:
    """Return whether only rendezvous order puts one candidate behind the first."""
    held = (max(view.match.get(each.replica_id, 0), view.pending.get(each.replica_id, 0)) for each in (one, first))
    return one.score <= first.score * (1.0 + TIE_TOLERANCE) and len(set(held)) == 1
