"""A router without Ray: its knowledge of the replicas, and a policy, behind one lock. Any thread may call any method.

The step "match, rank, reserve" is synchronous, so that no two decisions see the same idle replica.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from random import Random
from threading import Lock
from typing import Any

from router.directory.directory import Directory
from router.known_replicas import KnownReplicas
from router.observe.counters import RouterCounters
from router.observe.demand import RecentTimes, RequestTimes, TtftOverhead, WorkingSet
from router.observe.explain import explain
from router.observe.state import regret_state, router_state, sane_stats
from router.policy.candidates import RoutingView
from router.policy.costs import estimate
from router.policy.policies import POLICIES, Policy, least_loaded
from router.policy.recheck import MAX_REROUTES
from router.protocol.block_hash import HASH_BYTES
from router.protocol.events import Event, LoadReport, StatsReport
from router.protocol.request import Decision, Reason, RoutedRequest
from router.settings import RouterSettings


class RoutingCore:
    """Decides where requests go. ``directory``, ``loads``, ``drift``: only for a thread that has this core alone."""

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
        self._known = KnownReplicas(router_id, self.settings.block_size, self.settings.max_blocks)
        self.loads, self.drift = self._known.loads, self._known.drift
        self._policy = self._new_policy(self.settings.policy)
        self._overhead = TtftOverhead()
        self._times = RequestTimes()
        self._working_set = WorkingSet()

    @property
    def directory(self) -> Directory:
        """Which replica holds which block."""
        return self._known.directory

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """The replicas that requests may go to; those that are away are not among them."""
        away = self._known.away
        return tuple(replica_id for replica_id in self.loads.replica_ids if replica_id not in away)

    @property
    def knows_every_cache(self) -> bool:
        """Whether there are replicas and the feed of each has delivered its snapshot (see ``follow``)."""
        replica_ids, is_live = self.replica_ids, self._known.is_live
        return is_live is not None and bool(replica_ids) and all(map(is_live, replica_ids))

    def follow(
        self,
        is_live: Callable[[str], bool],
        blocked: Callable[[], Collection[str]] = tuple,
        resync: Callable[[str], None] | None = None,
    ) -> None:
        """Say who knows whether a feed is complete, who is full beyond the reports, and who asks for snapshots."""
        self._known.is_live, self._known.resync = is_live, resync
        self._blocked = blocked

    def configure(self, settings: RouterSettings) -> None:
        """Use other settings from the next decision on; another block size or bound empties the directory."""
        with self._lock:
            before, self.settings = self.settings, settings
            self._counted = self.counters.by_policy[settings.policy]
            if (before.policy, before.block_size) != (settings.policy, settings.block_size):
                self._policy = self._new_policy(settings.policy)
            if (before.block_size, before.max_blocks) != (settings.block_size, settings.max_blocks):
                self._known.forget_blocks(settings.block_size, settings.max_blocks)

    def update_replicas(
        self,
        replica_ids: Iterable[str],
        away: Collection[str] = (),
        labels: Mapping[str, Mapping[str, str]] | None = None,
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Make the set equal to these, keep what is known of who is ``away``; return who was added and removed."""
        with self._lock:
            added, removed = self._known.update(replica_ids, away)
            self._known.labels = labels or {}
            for replica_id in removed:
                self.counters.decisions_by_replica.pop(replica_id, None)
        return added, removed

    def drop_replica(self, replica_id: str) -> None:
        """Forget a replica that died."""
        with self._lock:
            self._known.drop(replica_id)
            self.counters.decisions_by_replica.pop(replica_id, None)

    def apply(self, replica_id: str, events: Iterable[Event]) -> None:
        """Take one feed message's events; events of unknown replicas are ignored."""
        with self._lock:
            self._known.apply(replica_id, events, self._clock())

    def decide(self, request: RoutedRequest, blocked: Collection[str] = ()) -> Decision | None:
        """Choose a replica and reserve its work; None while all are full. ``blocked``: who is full as Serve says."""
        started_s = self._clock()
        with self._lock:
            decision = self._decide(request, blocked, started_s)
            self.counters.decision_s.observe(self._clock() - started_s)
        return decision

    def holders(self, request: RoutedRequest) -> dict[str, int]:
        """Return how many leading prompt tokens each replica can reuse, of those that can reuse any."""
        with self._lock:
            return dict(self.directory.match(self._reusable_chain(request)))

    def decide_unkeyed(self, blocked: Collection[str] = ()) -> str | None:
        """Return the least loaded replica for a call without a prompt, None while every replica is full."""
        with self._lock:
            request, closed = RoutedRequest("", b"", 0, b""), self._closed(blocked)
            view = RoutingView(request, {}, self.loads, self._turn, self._rng, self.settings.scoring, closed)
            ranked = least_loaded(view, 1)
        return ranked[0].replica_id if ranked else None

    def release(self, decision: Decision) -> None:
        """End a decision's reservation, at the first token or on error; again is harmless."""
        with self._lock:
            self._known.release(decision.reservation)

    def reported(self, decision: Decision) -> None:
        """Hear that its replica's reports now count a decision's work: it is in flight, and reserved no longer."""
        with self._lock:
            self.loads.reported(decision.reservation)

    def rerouted(self, decision: Decision, load: LoadReport) -> None:
        """Take back a decision that a replica did not follow, and learn the load that it told instead."""
        with self._lock:
            self._known.release(decision.reservation)
            self._known.told(decision.replica_id, load, self._clock())
            self.counters.rerouted += 1

    def explain(self, request: RoutedRequest, policies: Collection[str]) -> dict[str, Any]:
        """Say what each policy would decide now, and why; JSON-able. Counts nothing: the next ``decide`` does that."""
        with self._lock:
            now_s = self._clock()
            self._known.expire(now_s)
            view = self._view_of(request, self._blocked(), now_s)
            acting = {self.settings.policy: self._policy}
            rankings = {
                name: (acting.get(name) or self._new_policy(name)).rank(
                    view._replace(turn=self._turn + 1, rng=copy(self._rng))
                )
                for name in policies
            }
            tiers = self.directory.tiers(self._reusable_chain(request), view.match)
            return explain(view, rankings, tiers)

    def record_delivered(
        self, decision: Decision, cached_tokens: int, ttft_s: float, chain: bytes = b"", *, stored: bool = True
    ) -> None:
        """Count what was really reused and how long the first token took. ``stored``: its blocks stay there."""
        with self._lock:
            selected, held = decision.selected_cached_tokens, 0
            if cached_tokens < selected:
                held = self.directory.match(chain).get(decision.replica_id, 0)
            self._counted.by_reason[decision.reason].add_delivered(selected, cached_tokens, held)
            if stored:
                self._known.computed(decision.replica_id, chain)
            if decision.estimated_ttft_s > 0.0:
                self._counted.estimates.add(decision.estimated_ttft_s, ttft_s)
                self._overhead.add(decision.work_s, ttft_s)

    def stats(self) -> dict[str, StatsReport]:
        """Return the latest StatsReport of each replica that sent one, without nonsense."""
        with self._lock:
            latest = dict(self._known.stats)
        return {replica_id: sane_stats(report) for replica_id, report in latest.items()}

    def demand(self) -> tuple[RecentTimes, int]:
        """Return what the requests of the last minute were like, and the tokens of the working set."""
        with self._lock:
            now_s = self._clock()
            blocks = self._working_set.blocks(now_s, self.loads.active_routers)
            return self._times.recent(now_s), blocks * self.settings.block_size

    def state(self) -> dict[str, Any]:
        """Return what ``/v1/cache/state`` shows of this router; JSON-able."""
        with self._lock:
            return {
                "router_id": self.router_id,
                "policy": self.settings.policy,
                **router_state(self.directory, self.drift, self.loads, self._known.away, self._clock()),
                "ttft_overhead_s": round(self._overhead.seconds, 6),
                "regret": regret_state(self.counters),
            }

    def _decide(self, request: RoutedRequest, blocked: Collection[str], now_s: float) -> Decision | None:
        self._known.expire(now_s)
        self._turn += 1
        view = self._view_of(request, blocked, now_s)
        chosen = self._policy.choose(view)
        if chosen is None:
            self.counters.all_full += 1
            return None
        replica_id, _, reason = chosen
        selected, uncached, pull_from, pull_tokens, work_s, ttft_s = estimate(view, replica_id)
        queued: int | None = None
        if self._may_reroute(request, replica_id, reason):
            queued = self.loads.queue_ahead(replica_id)
        number = self.loads.reserve(replica_id, uncached, now_s)
        if request.block_hashes and request.store_kv:
            self._known.pending.add(request.placement_key, number, replica_id, request.block_hashes)
        best = view.best_tokens
        if not request.rerouted:  # a request is counted once, however often it is decided about
            # For autoscaling only what more replicas would change.
            self._times.add(work_s, uncached * self.loads.replicas[replica_id].seconds_per_token, now_s)
            if best:
                self._working_set.add(request.block_hashes, best // self.settings.block_size, now_s)
            self._counted.by_reason[reason].add_decision(request.prompt_tokens, best, selected)
        self.counters.decisions_by_replica[replica_id] += 1
        return Decision(
            replica_id, self.router_id, number, best, selected, reason, work_s, ttft_s, pull_from, pull_tokens, queued,
            now_s,
        )  # fmt: skip

    def _may_reroute(self, request: RoutedRequest, replica_id: str, reason: Reason) -> bool:
        """Say whether the replica may have more to do than is known here, and can be believed when it says so."""
        return (
            self.loads.active_routers > 1
            and self._policy.may_reroute
            and reason != "only_replica"
            and request.rerouted < MAX_REROUTES
            and not self._known.is_silent(replica_id)
        )

    def _view_of(self, request: RoutedRequest, blocked: Collection[str], now_s: float) -> RoutingView:
        """Return all that a policy needs to know of this request."""
        chain, known = self._reusable_chain(request), self._known
        match = known.directory.match(chain)
        pending = known.pending.match(request.placement_key, chain)
        for name in request.dead:  # its caller knows of the death before the news of it is here
            match.pop(name, None)
            pending.pop(name, None)
        adapter_s = known.adapters.wait_s(request.adapter, self.loads)
        scoring, closed, overhead_s = self.settings.scoring, self._closed(blocked), self._overhead.seconds
        return RoutingView(
            request, match, self.loads, self._turn, self._rng, scoring, closed, pending, None, adapter_s, overhead_s,
            now_s, known.labels, not request.rerouted,
        )  # fmt: skip

    def _closed(self, blocked: Collection[str]) -> Collection[str]:
        away = self._known.away
        return away.union(blocked) if away else blocked

    def _reusable_chain(self, request: RoutedRequest) -> bytes:
        """Return the hashes of the blocks that can be reused: the last prompt token never counts."""
        usable = max(request.prompt_tokens - 1, 0) // self.settings.block_size * HASH_BYTES
        chain = request.block_hashes
        return chain[:usable] if len(chain) > usable else chain

    def _new_policy(self, name: str) -> Policy:
        return POLICIES[name](self.settings.block_size)
