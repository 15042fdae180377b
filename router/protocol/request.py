"""What a router reads of one request, and its decision."""

from typing import Literal

import msgspec

Reason = Literal[
    "cached",
    "in_flight",
    "cold",
    "load_spill",
    "only_replica",
    "round_robin",
    "power_of_two",
    "placement",
    "fallback",
]
"""The reason for a choice: stable words used by counters and documents."""


class ShadowDecision(msgspec.Struct, frozen=True, gc=False):
    """What another policy would have chosen for a request. ``same``: the replica that was chosen.

    ``predicted_tokens``: cached ones of the prompt on ``replica_id``, by the directory.
    """

    policy: str
    replica_id: str
    same: bool
    predicted_tokens: int
    estimated_ttft_s: float


class Decision(msgspec.Struct, frozen=True, gc=False):
    """The chosen replica and the reason. Token counts are predictions from the directory.

    ``best_cached_tokens``: of the best holder; ``estimated_ttft_s``: of work in the replica until the first token;
    ``reservation``: the number that ``LoadReport.admitted`` returns. ``pull_from``: the replica that supplies the KV of
    the first ``pull_tokens``, "" if computing is faster. A failed pull only costs time. ``queued_tokens``: the expected
    queue. The replica returns the request if it is far too low; None: it accepts the request in any case.
    ``decided_s``: on the router's monotonic clock. ``shadow``: of ``shadow_policy``, if it was asked.
    """

    replica_id: str
    router_id: str
    reservation: int
    best_cached_tokens: int
    selected_cached_tokens: int
    reason: Reason
    estimated_ttft_s: float = 0.0
    pull_from: str = ""
    pull_tokens: int = 0
    queued_tokens: int | None = None
    decided_s: float = 0.0
    shadow: ShadowDecision | None = None


class RoutedRequest(msgspec.Struct, frozen=True):
    """The fields of a request that a router reads; an engine's request is one with more fields.

    It is the first argument of the handle call, and reaches the replica with the router's ``decision``.
    """

    request_id: str
    block_hashes: bytes = b""
    """Packed chain of the prompt's full blocks."""
    prompt_tokens: int = 0
    placement_key: bytes = b""
    """16 bytes that keep related cold requests together (system-prompt key, or from a ``prompt_cache_key``)."""
    avoid: tuple[str, ...] = ()
    """Replicas that already failed this request."""
    adapter: str = ""
    """The key of its LoRA adapter, "" for none."""
    tenant: str = ""
    """For fair turns in the queue."""
    rerouted: int = 0
    """The number of returns by replicas with more queued work than the router expected."""
    store_kv: bool = True
    """False: the request leaves nothing in a replica's cache."""
    dead: tuple[str, ...] = ()
    """Those of ``avoid`` that also lost their KV."""
    order: int = 0
    """Among the tenant's waiting requests, the lowest is first."""
    reads_kv: bool = True
    """False: the request computes its whole prompt anew."""
    decision: Decision | None = None


class NoReplicaLeft(Exception):
    """No replica has existed for longer than a request waits for one."""
