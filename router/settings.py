"""Settings of one router, as JSON carries them in a deployment's ``request_router_kwargs``: names, defaults, checks.

What no deployment can set is a constant beside the code that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

PolicyName = Literal[
    "estimated_ttft", "lmetric", "bounded_hash", "sglang", "power_of_two", "round_robin", "least_loaded"
]
"""The scoring rules; ``policy/policies.py`` has them."""

POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
DEFAULT_POLICY: PolicyName = "estimated_ttft"


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What a deployment or a simulation may set of the default policy.

    ``shortest_first``: replicas run the least uncached work first, so a short request overtakes queued long ones;
    False scores a first-come-first-served queue. ``min_pull_tokens``: a shorter pull is not worth its set-up.
    ``max_holders``: replicas that hold one prefix at most; 1: a hot prefix gets no more holders.
    """

    shortest_first: bool = True
    min_pull_tokens: int = 1024
    max_holders: int = 16


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of one router. ``max_blocks``: in the directory; ``no_replica_wait_s``: how long without any replica."""

    policy: str = DEFAULT_POLICY
    block_size: int = 16
    max_blocks: int = 4_000_000
    no_replica_wait_s: float = 5.0
    scoring: PolicySettings = field(default_factory=PolicySettings)

    def __post_init__(self) -> None:
        if self.policy not in POLICY_NAMES:
            raise ValueError(f"unknown routing policy {self.policy!r}; known: {', '.join(sorted(POLICY_NAMES))}")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RouterSettings:
        """Build settings from a JSON object, in which ``scoring`` is an object. Raises ValueError or TypeError."""
        values = dict(values)
        return cls(scoring=PolicySettings(**values.pop("scoring", {})), **values)
