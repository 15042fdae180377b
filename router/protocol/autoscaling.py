"""The reports of replicas and ingresses to the autoscaling policy. Counters only rise, so a lost report is harmless."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Self

SEATS = "seats"
"""The only figure of a replica before a server that already runs: the replicas that all such servers need."""


class _Figures:
    """Numbers that are transferred by field name."""

    __slots__ = ()

    def to_floats(self) -> dict[str, float]:
        """Return the result of ``record_autoscaling_stats``."""
        return {name: float(value) for name, value in asdict(self).items()}  # type: ignore[call-overload]

    @classmethod
    def of(cls, floats: Mapping[str, float]) -> Self:
        """Parse the output of ``to_floats``. Raises ValueError if a number is missing, negative or not finite."""
        values = {field.name: floats.get(field.name, -1.0) for field in fields(cls)}  # type: ignore[arg-type]
        for name, value in values.items():
            if not isfinite(value) or value < 0.0:
                raise ValueError(f"{name} is {value}")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class ReplicaFigures(_Figures):
    """One replica. ``version``: a number that identifies the settings at its start.

    ``arrived_tokens``: all uncached prompt tokens since the start, computed or queued; ``queued_tokens``: those that
    wait or are being computed. ``prefill_tokens_per_s``: 0 while unknown. ``running``, ``waiting``: sequences;
    ``slots``: the maximum of running sequences. ``used_tokens``: pool tokens of running sequences; ``pinned_tokens``:
    by explicit saves, of ``pin_budget_tokens``; ``hands_over``: 1 if a leaving replica transfers its pins, else 0.
    """

    version: float
    arrived_tokens: float
    queued_tokens: float
    prefill_tokens_per_s: float
    running: float
    waiting: float
    slots: float
    pool_tokens: float
    used_tokens: float
    pinned_tokens: float
    pin_budget_tokens: float
    hands_over: float


@dataclass(frozen=True, slots=True)
class Bounds(_Figures):
    """The current settings: see ``AutoscalingConfig``."""

    min_replicas: float
    max_replicas: float
    target_ttft_s: float
    upscale_delay_s: float
    downscale_delay_s: float


@dataclass(frozen=True, slots=True)
class IngressFigures(Bounds):
    """One ingress, its settings and its router.

    ``requests``: routed in the last minute, with the p90 of their estimated TTFT and of their own prefill, and the
    latter's mean; ``waiting_requests``: not routed yet. ``working_set_tokens``: in repeatedly reused blocks.
    """

    requests: float
    p90_ttft_s: float
    p90_own_s: float
    mean_own_s: float
    waiting_requests: float
    working_set_tokens: float
