"""Checks an idle engine: all blocks are accounted for, and nothing of ended requests remains.

It reads the engine's private state, as nothing else outside ``serve_app`` does, and changes none of it.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.cache.tiers.tier_queue import TierQueue
from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.core.engine import TorchEngine

OURS = ("serve_app.", "router.")
_CONTAINERS = (dict, list, set, frozenset, deque, tuple, Counter, OrderedDict)


class Imbalance(Exception):
    """A law does not hold; the message names it."""


EMPTY_WHEN_IDLE = (
    *("LoadReporter._arrived", "LiveRequests._deadlines_s", "Budget._used_by", "EngineLoop.calls"),
    *("Scheduler._waiting", "RunningSet.sequences", "PendingBlocks._computing", "PendingBlocks._parked"),
    *("RunningSet._reserved", "Outbox._batches"),
    *("LoadedAdapters._live", "LoadedAdapters._running", "LoadedAdapters._retired", "TierLoader._fetches"),
)
"""Tables, by their names in ``tables``, that are empty while the engine has no requests."""


def audit(engine: TorchEngine, sizes: Mapping[str, int]) -> None:
    """Raise Imbalance unless an engine without requests holds exactly the blocks and entries it reports.

    Call it on the engine's loop, or on a stopped engine. ``sizes``: its ``tables``.
    """
    cache = engine.cache
    _audit_pool(cache)
    unknown = [name for name in EMPTY_WHEN_IDLE if name not in sizes]
    _hold(not unknown, f"there are no tables {unknown}: they were renamed, and EMPTY_WHEN_IDLE has to follow")
    left = {name: size for name in EMPTY_WHEN_IDLE if (size := sizes[name])}
    _hold(not left, f"no request is here, but there are {left}")
    adapters, reserved = engine.runner.adapters, engine.scheduler.reserved_blocks
    assert isinstance(adapters, LoadedAdapters)
    _hold(reserved == 0, f"{reserved} blocks are reserved to nobody")
    _hold(len(adapters._loaded) <= adapters._max_cpu_loras, "more adapters in memory than max_cpu_loras")
    _hold(len(adapters._slots) <= adapters._max_loras, "more adapters in slots than max_loras")
    _hold(sizes.get("LoraLayers._stacked", 0) <= adapters._max_loras, "adapters stay on the device without a slot")


def tier_hashes(engine: TorchEngine) -> dict[str, frozenset[bytes]]:
    """Return the hashes of the held blocks, by the tier's name in events."""
    held = {"pool": {entry.block_hash for entry in engine.cache.index}}
    for tier, index in engine.tier_loader.tiers.indexes.items():
        held[tier] = frozenset(entry.block.block_hash for entry in index)
    return held


def settled(engine: TorchEngine) -> bool:
    """Return whether no block is on its way to disk and every event was delivered."""
    tiers = engine.tier_loader.tiers
    if engine.cache._events or tiers.has_news:
        return False
    queues = [tier for tier in tiers.tiers if isinstance(tier, TierQueue)]
    return all(queue._work.empty() and not queue.pending_blocks for queue in queues)


def tables(root: object) -> dict[str, int]:
    """Return the number of entries of every container that an object of ours reaches, by class and attribute.

    A nested container's entries count too. Only attributes of our own classes are followed.
    """
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    line: list[tuple[str, Any]] = [("", root)]
    while line:
        name, found = line.pop()
        if id(found) in seen or found is None:
            continue
        if isinstance(found, _CONTAINERS):
            seen.add(id(found))
            if not isinstance(found, tuple):  # it cannot grow, but its items can
                sizes[name] += len(found)
            entries = [*found.keys(), *found.values()] if isinstance(found, Mapping) else list(found)
            line.extend((name, entry) for entry in entries if isinstance(entry, _CONTAINERS) or _is_ours(entry))
        elif _is_ours(found):
            seen.add(id(found))
            kind = type(found).__name__
            line.extend((f"{kind}.{attribute}", value) for attribute, value in _attributes(found))
    return dict(sizes)


def _is_ours(found: object) -> bool:
    return str(type(found).__module__).startswith(OURS)


def _attributes(found: object) -> Iterator[tuple[str, Any]]:
    names = [name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())]
    if is_dataclass(found):
        names.extend(field.name for field in fields(found))
    for name in dict.fromkeys([*names, *getattr(found, "__dict__", {})]):
        yield name, getattr(found, name, None)


def _audit_pool(cache: PrefixCache) -> None:
    pool, pins = cache.pool, cache.pins.counts()
    everything = [*pool._free, *pool._idle, *(b for b in range(pool.total_blocks) if pool.references(b))]
    _hold(
        sorted(everything) == list(range(pool.total_blocks)),
        f"{len(everything)} of {pool.total_blocks} blocks are free, idle or in use",
    )
    _hold(
        all(pool.references(block) == pins.get(block, 0) for block in range(pool.total_blocks)),
        f"{pool.used_blocks} blocks are in use and {len(pins)} pinned, with no request here",
    )
    _hold(cache.pins.blocks <= cache.pins.budget_blocks, "more is pinned than the budget")
    held, taken = sum(cache.quota.holdings().values()), pool.total_blocks - pool.free_blocks
    _hold(held == taken, f"tenants hold {held} blocks, and {taken} are taken")


def _hold(law: bool, otherwise: str) -> None:
    if not law:
        raise Imbalance(otherwise)
