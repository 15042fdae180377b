"""Settings of one router, as JSON carries them in a deployment's ``request_router_kwargs``.

Owns names, defaults and their checks; knows nothing of how any of them is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from router.policies import DEFAULT_POLICY, POLICIES
from router.rule_settings import LoadSettings, PolicySettings


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
            if policy not in POLICIES:
                raise ValueError(f"unknown routing policy {policy!r}; known: {', '.join(sorted(POLICIES))}")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RouterSettings:
        """Build settings from a JSON object; ``load`` and ``scoring`` are objects. Raises ValueError or TypeError."""
        values = dict(values)
        load = LoadSettings(**values.pop("load", {}))
        scoring = PolicySettings(**values.pop("scoring", {}))
        return cls(load=load, scoring=scoring, **values)
