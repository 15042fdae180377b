"""What a simulated cluster is made of: rates, pools, a policy. Shared by everything that replays."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from router.settings import DEFAULT_POLICY

STEP_S = 0.1
"""The longest prefill of one step, as in our engines' scheduler."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What one replica computes, and how long everything around it takes.

    A step takes its prompt tokens / ``prefill_tokens_per_s``, and if sequences decode in it, ``decode_step_s`` and
    ``decode_each_s`` for each. It has at most ``step_tokens``. ``overhead_s``: of a request before its first token,
    besides queue and steps. ``pull_tokens_per_s``: KV copied from another replica, 0: never.
    """

    prefill_tokens_per_s: float
    decode_step_s: float = 0.0
    decode_each_s: float = 0.0
    overhead_s: float = 0.0
    pull_tokens_per_s: float = 0.0
    step_tokens: int = 8192
    max_num_seqs: int = 256
    max_itl_s: float = inf

    def decode_s(self, sequences: int) -> float:
        """Return the part of a step in which so many sequences decode."""
        return self.decode_step_s + self.decode_each_s * sequences if sequences else 0.0


@dataclass(frozen=True, slots=True)
class CacheTier:
    """Evicted KV below the pool: ``tokens`` of it, loaded at ``tokens_per_s``; ``shared`` by all replicas."""

    name: str
    tokens: int
    tokens_per_s: float
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """One simulated cluster. ``pool_tokens``: of one replica, with running answers.

    ``shortest_first``: less uncached work first, else in order of arrival. ``start_s``: from the decision until a new
    replica takes requests. ``warm_join``, ``hand_over``: KV copied at most in ``warm_join_s`` and ``hand_over_s``, at
    ``Rates.pull_tokens_per_s``. ``answers_cached``: the next request of a conversation finds the last answer's KV.
    ``changes``: without a rule, moments and the number of replicas from then on. ``served_by``: by request, the replica
    that it goes to if no other is better, in the order in which they come: a recorded run's, -1 for any. ``runs``: so
    often, with shifted arrivals, for the mean.
    """

    name: str
    rates: Rates
    replicas: int = 1
    pool_tokens: int = 100_000
    policy: str = DEFAULT_POLICY
    tiers: tuple[CacheTier, ...] = ()
    shortest_first: bool = True
    start_s: float = 60.0
    warm_join: bool = True
    hand_over: bool = True
    warm_join_s: float = 10.0
    hand_over_s: float = 20.0
    answers_cached: bool = True
    changes: tuple[tuple[float, int], ...] = ()
    served_by: tuple[int, ...] = ()
    runs: int = 1
