"""The LoRA adapters in memory and in the batch, with the requests that still need them.

Two LRUs: adapters in host memory (``max_cpu_loras``; those with live requests stay) and slots in the batch
(``max_loras``; those of running sequences stay). Any thread may call; only ``load`` takes long, and it holds no lock
meanwhile.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from router.protocol.samples import Labels, Sample
from serve_app.engine.protocol import AdapterSpec, QueueFull, UnknownAdapter
from serve_app.errors import LimitReason

W = TypeVar("W")


class LoadedAdapters(Generic[W]):
    """LoRA adapters by ``AdapterSpec.key``, with the results of ``load``; the key "" is the base model."""

    def __init__(
        self,
        load: Callable[[AdapterSpec], W],
        *,
        max_loras: int,
        max_cpu_loras: int,
        on_forget: Callable[[W], None] = lambda _: None,
    ) -> None:
        """``on_forget``: called with a dropped result of ``load``, while the lock is held."""
        if max_loras < 1 or max_cpu_loras < max_loras:
            raise ValueError("max_loras must be at least 1, and max_cpu_loras at least max_loras")
        self._load = load
        self._on_forget = on_forget
        self._max_loras = max_loras
        self._max_cpu_loras = max_cpu_loras
        self._lock = threading.Lock()
        self._loaded: OrderedDict[str, W] = OrderedDict()
        self._slots: OrderedDict[str, None] = OrderedDict()
        self._live: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._retired: set[str] = set()
        self._loads = 0
        self._evictions = 0

    @property
    def loaded(self) -> tuple[str, ...]:
        """Keys of the adapters that requests can name, least recently used first."""
        with self._lock:
            return tuple(key for key in self._loaded if key not in self._retired)

    @property
    def in_slots(self) -> tuple[str, ...]:
        """Keys that hold a slot, least recently used first."""
        with self._lock:
            return tuple(self._slots)

    def load(self, spec: AdapterSpec) -> None:
        """Make an adapter available in place of an idle one. Raises AdapterError, and QueueFull if none is idle."""
        with self._lock:
            if self._renew(spec.key):
                return
        weights = self._load(spec)
        with self._lock:
            if self._renew(spec.key):
                self._on_forget(weights)
                return
            while len(self._loaded) >= self._max_cpu_loras:
                idle = next((key for key in self._loaded if not self._live[key]), None)
                if idle is None:
                    self._on_forget(weights)
                    raise QueueFull(LimitReason("engine", "max_cpu_loras"), retry_after_s=1.0)
                self._forget(idle)
                self._evictions += 1
            self._loaded[spec.key] = weights
            self._loads += 1

    def unload(self, key: str) -> bool:
        """Refuse new requests for ``key`` and free it when its last live one ends; False if it is not loaded."""
        with self._lock:
            if key not in self._loaded or key in self._retired:
                return False
            self._retired.add(key)
            self._free_retired(key)
            return True

    def pin(self, key: str) -> None:
        """Count a live request. Raises UnknownAdapter if the adapter is not loaded."""
        if not key:
            return
        with self._lock:
            if key not in self._loaded or key in self._retired:
                raise UnknownAdapter(f"the adapter {key.rpartition('@')[0]!r} is not loaded")
            self._live[key] += 1
            self._loaded.move_to_end(key)

    def unpin(self, key: str) -> None:
        """Note that a live request ended."""
        if not key:
            return
        with self._lock:
            _decrement(self._live, key)
            self._free_retired(key)

    def room(self, key: str) -> bool:
        """Return whether ``acquire`` could succeed now."""
        if not key:
            return True
        with self._lock:
            return key in self._slots or len(self._slots) < self._max_loras or self._idle_slot() is not None

    def acquire(self, key: str) -> None:
        """Give a running sequence's adapter a slot; if all are taken, that of the least recently used idle one."""
        if not key:
            return
        with self._lock:
            if key not in self._slots and len(self._slots) >= self._max_loras:
                idle = self._idle_slot()
                assert idle is not None, "no slot is idle: ask room() first"
                del self._slots[idle]
            self._slots[key] = None
            self._slots.move_to_end(key)
            self._running[key] += 1

    def release(self, key: str) -> None:
        """Note that a running sequence ended; the slot stays, idle, until another adapter needs it."""
        if key:
            with self._lock:
                _decrement(self._running, key)

    def weights(self, key: str) -> W:
        """Return the result of ``load`` for an adapter with live requests."""
        with self._lock:
            return self._loaded[key]

    def samples(self, labels: Labels) -> Iterable[Sample]:
        """Yield the numbers of loaded and running adapters and of used slots, and the loads and evictions so far."""
        with self._lock:
            counts = (("loaded", len(self._loaded)), ("slots", len(self._slots)), ("running", len(self._running)))
            loads, evictions = self._loads, self._evictions
        for state, count in counts:
            yield "warmpath_lora_adapters", (*labels, ("state", state)), float(count)
        yield "warmpath_lora_loads_total", labels, float(loads)
        yield "warmpath_lora_evictions_total", labels, float(evictions)

    def _renew(self, key: str) -> bool:
        if key not in self._loaded:
            return False
        self._retired.discard(key)
        self._loaded.move_to_end(key)
        return True

    def _idle_slot(self) -> str | None:
        return next((key for key in self._slots if not self._running[key]), None)

    def _free_retired(self, key: str) -> None:
        if key in self._retired and not self._live[key]:
            self._forget(key)

    def _forget(self, key: str) -> None:
        self._on_forget(self._loaded.pop(key))
        self._slots.pop(key, None)
        self._retired.discard(key)


def _decrement(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    assert counter[key] >= 0, "an adapter was given back more often than taken"
    if not counter[key]:
        del counter[key]
