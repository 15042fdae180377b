"""Settings of the scoring rules and of the load table.

Owns names, defaults and what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass


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
