"""One router's knowledge of its replicas. It makes no decisions and is not thread-safe. Callers pass in the time."""

from collections.abc import Callable, Collection, Iterable

from router.directory import Directory, DriftChecks, PendingPrefixes
from router.load import LoadTable, LoraResidency
from router.protocol.events import BlocksStored, CacheCleared, CacheDigest, Event, LoadReport, StatsReport

SILENT_S = 5.0
"""A replica reports its load once a second. A feed without messages or a snapshot for this long is silent: its reports
are outdated, and the cache is known only from the replica's answers."""


QUIET_S = 3.0
"""A replica that sends nothing for this long, while others do, may be frozen."""


class KnownReplicas:
    """The replicas' loads, caches and reports. Only this class may change the set of replicas or end a reservation.

    ``away``: replicas that may return soon and get no requests; ``quiet``: those that send nothing while others do, and
    get requests only when no other can take them; ``out``: those that say that they cannot take any (``LoadReport``);
    ``stats``: the latest StatsReport by replica;
    ``is_live``: returns whether a feed is complete; ``resync``: asks for a snapshot.
    """

    def __init__(self, router_id: str, block_size: int, max_blocks: int) -> None:
        self.loads = LoadTable(router_id)
        self.adapters = LoraResidency()
        self.stats: dict[str, StatsReport] = {}
        self.away: frozenset[str] = frozenset()
        self.quiet: frozenset[str] = frozenset()
        self.out: frozenset[str] = frozenset()
        self.is_live: Callable[[str], bool] | None = None
        self.resync: Callable[[str], None] | None = None
        self.drift = DriftChecks()
        self._heard_s: dict[str, float] = {}
        self._silent: set[str] = set()
        self._looked_s = 0.0
        self.forget_blocks(block_size, max_blocks)

    def forget_blocks(self, block_size: int, max_blocks: int) -> None:
        """Start over with an empty directory."""
        self.directory = Directory(block_size, max_blocks)
        self.pending = PendingPrefixes(block_size)
        for replica_id in self.loads.replica_ids:
            self.directory.add_replica(replica_id)
            if self.resync is not None:
                self.resync(replica_id)

    def update(self, replica_ids: Iterable[str], away: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Set the replicas to ``replica_ids``, keep those ``away``, and return the added and the removed replicas."""
        listed = dict.fromkeys(replica_ids)
        present = set(self.loads.replica_ids)
        self.away = frozenset(replica_id for replica_id in present.intersection(away) if replica_id not in listed)
        added = tuple(replica_id for replica_id in listed if replica_id not in present)
        removed = tuple(
            replica_id for replica_id in present if replica_id not in listed and replica_id not in self.away
        )
        for replica_id in added:
            self.loads.add_replica(replica_id)
            self.directory.add_replica(replica_id)
        for replica_id in removed:
            self.drop(replica_id)
        return added, removed

    def drop(self, replica_id: str) -> None:
        """Forget a replica. Unknown ids are ignored."""
        self.away -= {replica_id}
        self._heard_s.pop(replica_id, None)
        self._silent.discard(replica_id)
        self.quiet -= {replica_id}
        self.out -= {replica_id}
        for number in self.loads.remove_replica(replica_id):
            self.pending.discard(number)
        self.directory.remove_replica(replica_id)
        self.adapters.forget(replica_id)
        self.stats.pop(replica_id, None)
        self.drift.forget(replica_id)

    def apply(self, replica_id: str, events: Iterable[Event], now_s: float) -> None:
        """Apply one feed message's events. Events of unknown replicas are ignored."""
        if replica_id not in self.loads.replicas:
            return
        self._heard_s[replica_id] = now_s
        self._silent.discard(replica_id)
        if self.quiet:
            self.quiet -= {replica_id}
        cache_events: list[Event] = []
        for event in events:
            if isinstance(event, LoadReport):
                self.loads.report(replica_id, event, now_s)
                self.adapters.report(replica_id, event)
                if bool(event.out) != (replica_id in self.out):
                    self.out ^= {replica_id}
            elif isinstance(event, StatsReport):
                self.stats[replica_id] = event
            elif isinstance(event, CacheDigest):
                self.directory.apply(replica_id, cache_events)
                cache_events.clear()
                self._compare(replica_id, event, now_s)
            else:
                cache_events.append(event)
        if cache_events:
            self.directory.apply(replica_id, cache_events)

    def _compare(self, replica_id: str, digest: CacheDigest, now_s: float) -> None:
        """Compare the directory with a digest, unless known gaps already cause a snapshot."""
        if self.is_live is None or self.resync is None or not self.is_live(replica_id):
            return
        if self.drift.compare(self.directory, replica_id, digest, now_s):
            self.resync(replica_id)

    def is_silent(self, replica_id: str) -> bool:
        """Whether a replica's feed is silent. No later report would correct a load learned elsewhere."""
        return replica_id in self._silent

    def take_report(self, replica_id: str, load: LoadReport, now_s: float) -> None:
        """Record a load that did not arrive by the feed."""
        if not self.is_silent(replica_id):
            self.loads.report(replica_id, load, now_s)

    def computed(self, replica_id: str, chain: bytes) -> None:
        """Record the blocks of a prompt after its first token, for a replica with a silent feed."""
        if self.is_silent(replica_id) and chain:
            self.directory.apply(replica_id, (BlocksStored(chain),))

    def release(self, reservation: int) -> None:
        """End a reservation. A repeated call has no effect."""
        self.loads.release(reservation)
        self.pending.discard(reservation)

    def expire(self, now_s: float) -> None:
        """End old reservations, find quiet replicas, and forget the reported load and blocks of newly silent ones."""
        for number in self.loads.expire(now_s):
            self.pending.discard(number)
        if self.is_live is None or now_s - self._looked_s < 0.5:
            return
        self._looked_s = now_s
        quiet = {replica_id for replica_id, heard_s in self._heard_s.items() if now_s - heard_s >= QUIET_S}
        self.quiet = frozenset(quiet if len(quiet) < len(self._heard_s) else ())
        for replica_id, heard_s in self._heard_s.items():
            if now_s - heard_s >= SILENT_S and replica_id not in self._silent and not self.is_live(replica_id):
                self._silent.add(replica_id)
                self.loads.disbelieve(replica_id)
                self.directory.apply(replica_id, (CacheCleared(),))
