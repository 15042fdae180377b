"""Settings of one router, stored as JSON in a deployment's ``request_router_kwargs``: names, defaults, checks.

The defaults of these settings stand here alone. A deployment's config, the engines and the simulation take them from
``DEFAULTS``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

PolicyName = Literal[
    "estimated_ttft", "lmetric", "bounded_hash", "sglang", "power_of_two", "round_robin", "least_loaded"
]
"""The scoring rules, defined in ``policies.py``."""

POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
DEFAULT_POLICY: PolicyName = "estimated_ttft"

MAX_ATTRIBUTES = 16
"""The maximum of a replica's attributes in its load report. Further ones are ignored."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The settings of the default policy, for deployments and simulations.

    ``shortest_first``: replicas run the least uncached work first, so a short request overtakes queued long ones;
    False: scores assume a first-come, first-served queue. ``min_pull_tokens``: a shorter pull is not worth its setup.
    ``max_holders``: the maximum of replicas that hold one prefix; load decides how many do.
    """

    shortest_first: bool = True
    min_pull_tokens: int = 512
    max_holders: int = 16


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of one router. ``max_blocks``: in the directory; ``no_replica_wait_s``: the wait without any replica.

    ``shadow_policy``: decides beside ``policy`` without acting, "" for none.
    """

    policy: str = DEFAULT_POLICY
    block_size: int = 16
    max_blocks: int = 2_000_000
    no_replica_wait_s: float = 5.0
    scoring: PolicySettings = field(default_factory=PolicySettings)
    shadow_policy: str = ""

    def __post_init__(self) -> None:
        for policy in (self.policy, self.shadow_policy or self.policy):
            if policy not in POLICY_NAMES:
                raise ValueError(f"unknown routing policy {policy!r}; known: {', '.join(sorted(POLICY_NAMES))}")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RouterSettings:
        """Build settings from a JSON object, in which ``scoring`` is an object. Raises ValueError or TypeError."""
        values = dict(values)
        return cls(scoring=PolicySettings(**values.pop("scoring", {})), **values)


DEFAULTS = RouterSettings()
