"""The tiers below vLLM's pool, disk and object store: opened, told to the routers, written and loaded.

vLLM's own host memory is beside them: its blocks count as the pool's.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from router.protocol.block_hash import HASH_BYTES
from router.protocol.events import POOL_TIER, BlocksStored, CacheCleared, CacheDigest, Event
from router.protocol.samples import Labels, Sample
from router.vllm_events.pool import FollowedPool
from serve_app.cache.kv_chain import KvFormat
from serve_app.cache.prefix.pins import Pins
from serve_app.cache.prefix.quota import PUBLIC
from serve_app.cache.prefix_digest import scope_digest
from serve_app.cache.tiers.tiers import Tiers
from serve_app.config.cache import CacheSection
from serve_app.engine.protocol import EngineRequest, EventSink
from serve_app.engine.reports import EngineMeters
from serve_app.engine.vllm.settings import VllmSettings
from serve_app.engine.vllm.tier_loader import PrefixLoader
from serve_app.engine.vllm.tier_writer import CLOSE_S, COPY_BYTES, TierWriter, saved_until_s
from serve_app.engine.vllm.transfer.migration import VllmMigration

_NOTHING = KvFormat("", 1, ())


class VllmTiers:
    """One engine's tiers. All may be off. ``hear`` is the sink of the pool's events, which adds the tiers' own."""

    def __init__(
        self,
        settings: VllmSettings,
        num_blocks: int,
        pool: FollowedPool,
        transfer: VllmMigration,
        meters: EngineMeters,
        pins: Pins,
        busy: Callable[[], bool],
        sink: EventSink,
    ) -> None:
        """Open the tiers; they have a previous run's blocks. Raises OSError or ValueError."""
        kv_format = transfer.kv_format or _NOTHING
        below = settings.tiers if transfer.kv_format is not None else CacheSection()
        size_bytes = max(1, kv_format.block_bytes)
        changed = threading.Condition()
        self.tiers = Tiers(below, kv_format, size_bytes, partial(_notify, changed), shares=settings.tenant_shares)
        most = max(1, min(COPY_BYTES, below.disk_queue_bytes) // size_bytes)
        self.writer = TierWriter(
            self.tiers, pool, transfer, num_blocks, most, busy=busy, send=partial(self.hear, ()), changed=changed
        )
        self.loader = PrefixLoader(
            self.tiers,
            pool,
            transfer,
            meters,
            settings.block_size,
            below.tier_load_ratio,
            changed=changed,
            lost=self.writer.lost,
        )
        self._on = bool(self.tiers.tiers)
        self._pins = pins
        self._sink = sink
        self._telling = threading.Lock()
        if self._on:
            pins.on_end = self._end_save

    def start(self) -> None:
        """Begin to write."""
        if self._on:
            self.writer.start()

    def close(self) -> None:
        """Write what waits, and give saves their remaining time, as far as there is time. vLLM must still run."""
        if not self._on:
            return
        self._pins.on_end = None
        self.loader.close()
        self.writer.close()
        for pin in self._pins.soonest_first():  # a block under several pins gets the last one's end
            left_s = None if pin.ttl_s is None else pin.expires_s - self.writer.clock()
            for tier in self.tiers.keeping:
                tier.mark([_hash(number) for number in pin.blocks], saved_until_s(left_s))
        self.tiers.close(self.writer.clock() + CLOSE_S)

    def note(self, request: EngineRequest) -> None:
        """Note a request before it starts (any thread): its tenant has a share from now on."""
        if not self._on:
            return
        scope, root = request.scope, request.root
        self.tiers.seen([request.tenant, PUBLIC] if scope.public_blocks else [request.tenant])
        self.tiers.learn(scope_digest(scope.private), root[-HASH_BYTES:])
        if scope.public_blocks:
            self.tiers.learn(scope_digest(scope.public), root[:HASH_BYTES])

    def used(self, request: EngineRequest, blocks: int) -> None:
        """Note that a request used the first ``blocks`` of its chain in the pool."""
        if self._on and request.store_kv:
            self.writer.used(request.block_hashes, blocks)

    def rest(self) -> None:
        """Note that no request runs."""
        if self._on:
            _notify(self.writer.changed)

    def saved(self, chain: bytes, ttl_s: float | None) -> None:
        """Keep a saved prefix (packed hashes) of the pool below it, too."""
        if self._on:
            self.writer.save(chain, ttl_s)

    def reset(self, *, tiers: bool) -> None:
        """Let nothing from before enter pool or tiers; ``tiers``: forget all blocks of the tiers."""
        if self._on:
            self.loader.forget()
            self.writer.forget()
            if tiers:
                self.tiers.clear()
                self.hear(())

    def hear(self, events: Sequence[Event]) -> None:
        """Pass on events of the pool, and the tiers' since the last call, in order (any thread)."""
        if not self._on:
            self._sink(events)
            return
        with self._telling:
            told: list[Event] = []
            for event in events:
                if isinstance(event, CacheDigest):
                    told += self.tiers.take_events()
                    event = CacheDigest((*event.tiers, *self.tiers.digests()))
                told.append(event)
                if isinstance(event, CacheCleared):  # routers then know nothing of the replica
                    self.tiers.announce()
                elif isinstance(event, BlocksStored) and event.tier == POOL_TIER:
                    self.writer.stored(event.hashes)
            told += self.tiers.take_events()
            if told:
                self._sink(told)

    @property
    def loaded(self) -> tuple[float, float]:
        """The blocks loaded from the tiers since the start, and the seconds of these loads."""
        tiers = self.tiers.tiers
        return float(sum(tier.counts.hits for tier in tiers)), sum(tier.load_seconds.total for tier in tiers)

    def samples(self, labels: Labels) -> Iterable[Sample]:
        """Return the tiers' gauges, counters and load times (any thread)."""
        return self.tiers.samples(labels)

    def _end_save(self, numbers: Sequence[int]) -> None:
        self.tiers.end_save([_hash(number) for number in numbers])


def _hash(number: int) -> bytes:
    """Return the hash of a block by its number in ``Pins`` (``saves.block_number``)."""
    return number.to_bytes(HASH_BYTES, "big")


def _notify(changed: threading.Condition) -> None:
    with changed:
        changed.notify_all()
