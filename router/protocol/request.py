"""What a router needs to know of one request, and what it decided: what crosses the Serve handle."""

from typing import Literal

import msgspec

Reason = Literal[
    "cached",
    "in_flight",
    "cold",
    "load_spill",
    "hot_prefix",
    "only_replica",
    "round_robin",
    "power_of_two",
    "placement",
    "fallback",
]
"""Why a replica was chosen: stable words that counters and documents use."""


class RoutedRequest(msgspec.Struct, frozen=True, gc=False):
    """The routing view of one request; travels as the keyword argument ``route`` of the handle call.

    ``block_hashes``: packed chain of the prompt's full blocks. ``placement_key``: 16 bytes that keep related
    cold requests together (system-prompt key, or derived from a client's ``prompt_cache_key``).
    ``avoid``: replicas that already failed this request; ``dead``: those of them whose KV is gone with them.
    ``adapter``: the key of its LoRA adapter, "" for none.
    ``tenant``: whose it is, for the turns of those that wait. ``rerouted``: how often a replica has sent it back
    because more was queued there than the router believed. ``store_kv`` False: it leaves nothing in a replica's cache.
    ``order``: of its tenant's requests that wait, those of the lowest go first.
    """

    request_id: str
    block_hashes: bytes
    prompt_tokens: int
    placement_key: bytes
    avoid: tuple[str, ...] = ()
    adapter: str = ""
    tenant: str = ""
    rerouted: int = 0
    store_kv: bool = True
    dead: tuple[str, ...] = ()
    order: int = 0


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Where a request was sent and why. Token counts are predictions made from the directory.

    ``best_cached_tokens``: of whoever has most; ``work_s``: in the replica until the first token; ``estimated_ttft_s``:
    that with what is beside it; ``reservation``: what ``LoadReport.admitted`` tells back. ``pull_from``: who hands over
    the KV of the first ``pull_tokens``, "" where computing is faster; a pull that fails costs time only.
    ``queued_tokens``: believed queued at the replica, which sends the request back where that is far too low; None: it
    takes it. ``decided_s``: on the router's monotonic clock.
    """

    replica_id: str
    router_id: str
    reservation: int
    best_cached_tokens: int
    selected_cached_tokens: int
    reason: Reason
    work_s: float = 0.0
    estimated_ttft_s: float = 0.0
    pull_from: str = ""
    pull_tokens: int = 0
    queued_tokens: int | None = None
    decided_s: float = 0.0


class NoReplicaLeft(Exception):
    """There has been no replica for longer than a request waits for one."""
