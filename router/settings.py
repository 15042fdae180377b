"""Settings of one router, as JSON carries them in a deployment's ``request_router_kwargs``.

Owns names, defaults and their checks; knows nothing of how any of them is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

POLICY_NAMES = ("estimated_ttft", "lmetric", "bounded_hash", "sglang", "power_of_two", "round_robin", "least_loaded")
"""The scoring rules there are (``policy/policies.py`` has them)."""

DEFAULT_POLICY = "estimated_ttft"


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Weights and thresholds. Only the field's own policy reads it.

    ``shortest_first``: replicas run the least uncached work first, so a short request overtakes queued long ones;
    False scores a first-come-first-served queue. ``pushback_weight``: seconds of others' delay that weigh as one
    second of one's own. ``tie_tolerance``: scores within this share of the best are equal, so that noise in measured
    rates does not scatter cold prompts.
    ``min_pull_tokens``: a shorter pull is not worth its set-up. ``pull_price``: how many seconds a second of pulling
    weighs in a score, for a copy takes room from other prefixes and the link from other pulls (see ``pull``).
    ``holder_utilisation``: the part of its time that a replica should spend on one prefix before another one holds it
    too; ``max_holders``: replicas that hold one prefix at most, 1: none is ever added (see ``hot_prefixes``).
    ``bounded_load``: bounded hashing's factor over the mean. ``sglang_*``: that router's three thresholds.
    """

    shortest_first: bool = True
    pushback_weight: float = 1.0
    tie_tolerance: float = 0.01
    min_pull_tokens: int = 1024
    pull_price: float = 2.0
    holder_utilisation: float = 0.5
    max_holders: int = 16
    bounded_load: float = 1.25
    sglang_relative: float = 1.1
    sglang_absolute: float = 32.0
    sglang_match_ratio: float = 0.5


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """``default_prefill_tokens_per_s`` holds until a replica has measured its own rate.

    ``default_pull_tokens_per_s``: how fast a replica copies KV that says nothing of it; 0: it does not.

    ``decode_weight``: how much each running sequence slows prefill, as a share of it.
    """

    default_prefill_tokens_per_s: float = 5000.0
    default_pull_tokens_per_s: float = 0.0
    decode_weight: float = 0.01
    reservation_ttl_s: float = 120.0


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of one router. ``follow_in_flight``: estimated_ttft counts prefixes that are being computed.

    ``shadow_policy``: decides beside ``policy`` without acting, "" for none. ``no_replica_wait_s``: requests wait this
    long after the last replica has gone, and then fail.
    """

    policy: str = DEFAULT_POLICY
    block_size: int = 16
    max_blocks: int = 4_000_000
    follow_in_flight: bool = True
    shadow_policy: str = ""
    no_replica_wait_s: float = 5.0
    load: LoadSettings = field(default_factory=LoadSettings)
    scoring: PolicySettings = field(default_factory=PolicySettings)

    def __post_init__(self) -> None:
        for policy in filter(None, (self.policy or "?", self.shadow_policy)):
            if policy not in POLICY_NAMES:
                raise ValueError(f"unknown routing policy {policy!r}; known: {', '.join(sorted(POLICY_NAMES))}")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RouterSettings:
        """Build settings from a JSON object; ``load`` and ``scoring`` are objects. Raises ValueError or TypeError."""
        values = dict(values)
        load = LoadSettings(**values.pop("load", {}))
        scoring = PolicySettings(**values.pop("scoring", {}))
        return cls(load=load, scoring=scoring, **values)
