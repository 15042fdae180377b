"""A router without Ray: the replicas' known state and a policy behind one lock. Any thread may call any method.

The step "match, rank, reserve" is synchronous, so that no two decisions see the same idle replica.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from random import Random
from threading import Lock
from typing import Any

from router.candidates import Match, RoutingView, estimate
from router.directory import Directory
from router.known_replicas import KnownReplicas
from router.observe import (
    RecentTimes,
    RequestTimes,
    RouterCounters,
    WorkingSet,
    explain,
    regret_state,
    router_state,
    sane_stats,
)
from router.policies import MAX_REROUTES, POLICIES, least_loaded
from router.protocol.block_hash import HASH_BYTES
from router.protocol.events import Event, LoadReport, StatsReport
from router.protocol.request import Decision, Reason, RoutedRequest
from router.settings import RouterSettings
from router.shadow import ShadowPolicy


class RoutingCore:
    """Routes requests. ``directory``, ``loads`` and ``drift`` are unlocked: use them only without other threads."""

    def __init__(
        self,
        router_id: str,
        settings: RouterSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        self.router_id = router_id
        self.settings = settings or RouterSettings()
        self.counters = RouterCounters()
        self._clock = clock
        self._rng = rng or Random(router_id)  # noqa: S311 (spreads load, guards nothing)
        self._lock = Lock()
        self._turn = 0
        self._blocked: Callable[[], Collection[str]] = tuple
        self._counted = self.counters.by_policy[self.settings.policy]
        self.other_versions: Mapping[str, int] = {}
        """The replicas of a release that does not mix with this one, which are not used, and their versions."""
        self._replicas = KnownReplicas(router_id, self.settings.block_size, self.settings.max_blocks)
        self.loads, self.drift = self._replicas.loads, self._replicas.drift
        self._policy = POLICIES[self.settings.policy]
        self.shadow = self._new_shadow()
        """Decides beside the policy without acting, None without ``shadow_policy``."""
        self._times = RequestTimes()
        self._working_set = WorkingSet()

    @property
    def directory(self) -> Directory:
        """The map from blocks to the replicas that hold them."""
        return self._replicas.directory

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """The replicas that can receive requests, without those away or out."""
        gone = self._replicas.away | self._replicas.out
        return tuple(replica_id for replica_id in self.loads.replica_ids if replica_id not in gone)

    @property
    def all_out(self) -> bool:
        """Whether there are replicas, and each one that is not away says that it cannot take any request."""
        return bool(self._replicas.out) and not self.replica_ids

    @property
    def knows_every_cache(self) -> bool:
        """Whether replicas exist and the feed of each has delivered its snapshot (see ``follow``)."""
        replica_ids, is_live = self.replica_ids, self._replicas.is_live
        return is_live is not None and bool(replica_ids) and all(map(is_live, replica_ids))

    def follow(
        self,
        is_live: Callable[[str], bool],
        blocked: Callable[[], Collection[str]] = tuple,
        resync: Callable[[str], None] | None = None,
    ) -> None:
        """Set the callbacks: feed completeness, full replicas that no report shows, and snapshot requests."""
        self._replicas.is_live, self._replicas.resync = is_live, resync
        self._blocked = blocked

    def configure(self, settings: RouterSettings) -> None:
        """Use new settings from the next decision on. A new block size or block limit empties the directory."""
        with self._lock:
            before, self.settings = self.settings, settings
            self._counted = self.counters.by_policy[settings.policy]
            self._policy = POLICIES[settings.policy]
            if (before.policy, before.shadow_policy) != (settings.policy, settings.shadow_policy):
                self.shadow = self._new_shadow()
            if (before.block_size, before.max_blocks) != (settings.block_size, settings.max_blocks):
                self._replicas.forget_blocks(settings.block_size, settings.max_blocks)

    def update_replicas(
        self, replica_ids: Iterable[str], away: Collection[str] = ()
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Set the replicas, keep the state of those ``away``, and return the added and the removed replicas."""
        with self._lock:
            added, removed = self._replicas.update(replica_ids, away)
            for replica_id in removed:
                self.counters.decisions_by_replica.pop(replica_id, None)
        return added, removed

    def drop_replica(self, replica_id: str) -> None:
        """Forget a replica that died."""
        with self._lock:
            self._replicas.drop(replica_id)
            self.counters.decisions_by_replica.pop(replica_id, None)

    def apply(self, replica_id: str, events: Iterable[Event]) -> None:
        """Apply one feed message's events. Events of unknown replicas are ignored."""
        with self._lock:
            self._replicas.apply(replica_id, events, self._clock())

    def decide(self, request: RoutedRequest, blocked: Collection[str] = ()) -> Decision | None:
        """Choose a replica and reserve its work, or return None while all are full or ``blocked`` (full in Serve)."""
        started_s = self._clock()
        with self._lock:
            decision = self._decide(request, blocked, started_s)
            self.counters.decision_s.observe(self._clock() - started_s)
        return decision

    def holders(self, request: RoutedRequest) -> dict[str, int]:
        """Return the number of reusable leading prompt tokens by replica, without replicas that can reuse none."""
        with self._lock:
            return dict(self.directory.match(self._reusable_chain(request)))

    def decide_unkeyed(self, blocked: Collection[str] = ()) -> str | None:
        """Return the least loaded replica for a call without a prompt, or None while every replica is full."""
        with self._lock:
            self._replicas.expire(self._clock())
            request, closed = RoutedRequest("", b"", 0, b""), self._closed(blocked)
            scoring, quiet = self.settings.scoring, self._replicas.quiet
            view = RoutingView(request, {}, self.loads, self._turn, self._rng, scoring, closed, quiet=quiet)
            ranked = least_loaded(view, 1)
        return ranked[0].replica_id if ranked else None

    def release(self, decision: Decision) -> None:
        """End a decision's reservation, at the first token or on error. A repeated call has no effect."""
        with self._lock:
            self._replicas.release(decision.reservation)

    def reported(self, decision: Decision) -> None:
        """Stop reserving a decision's work, because the replica's reports now count it as in flight."""
        with self._lock:
            self.loads.reported(decision.reservation)

    def rerouted(self, decision: Decision, load: LoadReport) -> None:
        """Cancel a decision that the replica refused, and record the load that the replica reported instead."""
        with self._lock:
            self._replicas.release(decision.reservation)
            self._replicas.take_report(decision.replica_id, load, self._clock())
            self.counters.rerouted += 1

    def explain(self, request: RoutedRequest, policies: Collection[str]) -> dict[str, Any]:
        """Return each policy's decision for now and its reasons, as JSON-able data. No counter changes."""
        with self._lock:
            now_s = self._clock()
            self._replicas.expire(now_s)
            view = self._view_of(request, self._blocked(), now_s)
            rankings = {
                name: POLICIES[name].rank(view._replace(turn=self._turn + 1, rng=copy(self._rng)), None)
                for name in policies
            }
            tiers = self.directory.tiers(self._reusable_chain(request), view.match)
            shadow = None if self.shadow is None else (self.shadow.policy, self.shadow.ranked(view))
            return explain(view, rankings, tiers, shadow)

    def record_delivered(
        self, decision: Decision, cached_tokens: int, ttft_s: float, chain: bytes = b"", *, stored: bool = True
    ) -> None:
        """Count the tokens really reused and the measured TTFT. ``stored``: the replica keeps the blocks."""
        with self._lock:
            selected, cached = decision.selected_cached_tokens, 0
            if cached_tokens < selected:
                cached = self.directory.match(chain).get(decision.replica_id, 0)
            self._counted.by_reason[decision.reason].add_delivered(selected, cached_tokens, cached)
            if stored:
                self._replicas.computed(decision.replica_id, chain)
            if decision.estimated_ttft_s > 0.0:
                self._counted.estimates.add(decision.estimated_ttft_s, ttft_s)

    def recount_delivered(self, decision: Decision, more_tokens: int) -> None:
        """Add to the reused tokens that were recorded for a decision before they were known for certain."""
        with self._lock:
            self._counted.by_reason[decision.reason].recount(more_tokens)

    def stats(self) -> dict[str, StatsReport]:
        """Return each replica's latest StatsReport, without invalid samples."""
        with self._lock:
            latest = dict(self._replicas.stats)
        return {replica_id: sane_stats(report) for replica_id, report in latest.items()}

    def waiting(self) -> int:
        """Return the sequences that wait at all replicas, as reported and as reserved since."""
        with self._lock:
            return int(self.loads.waiting.sum())

    def demand(self) -> tuple[RecentTimes, int]:
        """Return the last minute's request times, and the working set in tokens."""
        with self._lock:
            now_s = self._clock()
            blocks = self._working_set.blocks(now_s, self.loads.active_routers)
            return self._times.recent(now_s), blocks * self.settings.block_size

    def state(self) -> dict[str, Any]:
        """Return this router's part of ``/v1/cache/state``, as JSON-able data."""
        with self._lock:
            return {
                "router_id": self.router_id,
                "policy": self.settings.policy,
                **router_state(self.directory, self.drift, self.loads, self._replicas.away, self._clock()),
                "other_versions": dict(self.other_versions),
                "regret": regret_state(self.counters),
            }

    def _decide(self, request: RoutedRequest, blocked: Collection[str], now_s: float) -> Decision | None:
        self._replicas.expire(now_s)
        self._turn += 1
        view = self._view_of(request, blocked, now_s)
        ranked = self._policy.rank(view, 1)
        if not ranked:
            self.counters.all_full += 1
            return None
        replica_id, _, reason = ranked[0]
        estimated = estimate(view, replica_id)
        shadow = None
        if self.shadow is not None and not request.rerouted:  # at its first decision it was compared, and counted below
            shadow = self.shadow.compare(view, replica_id, estimated)
        selected, uncached, pull_from, pull_tokens, ttft_s = estimated
        queued: int | None = None
        if self._may_reroute(request, replica_id, reason):
            queued = self.loads.queue_ahead(replica_id)
        number = self.loads.reserve(replica_id, uncached, now_s)
        if request.block_hashes and request.store_kv:
            self._replicas.pending.add(request.placement_key, number, replica_id, request.block_hashes)
        best = view.best_tokens
        if not request.rerouted:
            # Autoscaling counts only the work that more replicas would speed up.
            self._times.add(ttft_s, uncached * self.loads.replicas[replica_id].seconds_per_token, now_s)
            if best:
                self._working_set.add(request.block_hashes, best // self.settings.block_size, now_s)
            self._counted.by_reason[reason].add_decision(request.prompt_tokens, best, selected)
        self.counters.decisions_by_replica[replica_id] += 1
        return Decision(
            replica_id, self.router_id, number, best, selected, reason, ttft_s, pull_from, pull_tokens, queued, now_s,
            shadow,
        )  # fmt: skip

    def _may_reroute(self, request: RoutedRequest, replica_id: str, reason: Reason) -> bool:
        """Return whether the replica may have more work than this router knows, and its own report is usable."""
        return (
            self.loads.active_routers > 1
            and self._policy.may_reroute
            and reason != "only_replica"
            and request.rerouted < MAX_REROUTES
            and not self._replicas.is_silent(replica_id)
        )

    def _view_of(self, request: RoutedRequest, blocked: Collection[str], now_s: float) -> RoutingView:
        """Return the policy's input for this request."""
        chain, replicas = self._reusable_chain(request), self._replicas
        match = replicas.directory.match(chain)
        pending = replicas.pending.match(request.placement_key, chain)
        # The caller learns of a replica's death before this router does. A frozen one sends no KV either.
        for name in (*request.dead, *replicas.quiet):
            match.pop(name, None)
            pending.pop(name, None)
        adapter_s = replicas.adapters.wait_s(request.adapter, self.loads)
        scoring, closed = self.settings.scoring, self._closed(blocked)
        loaded: Match = {}
        if self.loads.num_loading:
            near = replicas.directory.match(chain, below=False)
            loaded = {name: more for name, tokens in match.items() if (more := tokens - near.get(name, 0)) > 0}
        return RoutingView(
            request, match, self.loads, self._turn, self._rng, scoring, closed, pending, None, adapter_s, now_s,
            replicas.quiet, loaded,
        )  # fmt: skip

    def _new_shadow(self) -> ShadowPolicy | None:
        acting, policy = self.settings.policy, self.settings.shadow_policy
        rng = Random(f"{self.router_id}/shadow")  # noqa: S311 (as above)
        return ShadowPolicy(policy, self.counters.shadows[acting, policy], self._clock, rng) if policy else None

    def _closed(self, blocked: Collection[str]) -> Collection[str]:
        gone = self._replicas.away | self._replicas.out
        return gone.union(blocked) if gone else blocked

    def _reusable_chain(self, request: RoutedRequest) -> bytes:
        """Return the hashes of the reusable blocks. The last prompt token is never reused."""
        if not request.reads_kv:
            return b""
        usable = max(request.prompt_tokens - 1, 0) // self.settings.block_size * HASH_BYTES
        chain = request.block_hashes
        return chain[:usable] if len(chain) > usable else chain
