"""What replicas and ingresses tell the autoscaling policy, by name. Counters only rise, so a loss costs nothing."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Self


class _Figures:
    """Numbers that travel by their fields' names."""

    __slots__ = ()

    def to_floats(self) -> dict[str, float]:
        """Return what ``record_autoscaling_stats`` returns."""
        return {name: float(value) for name, value in asdict(self).items()}  # type: ignore[call-overload]

    @classmethod
    def of(cls, floats: Mapping[str, float]) -> Self:
        """Read what ``to_floats`` made. Raises ValueError where a number is missing, negative or not finite."""
        values = {field.name: floats.get(field.name, -1.0) for field in fields(cls)}  # type: ignore[arg-type]
        for name, value in values.items():
            if not isfinite(value) or value < 0.0:
                raise ValueError(f"{name} is {value}")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class ReplicaFigures(_Figures):
    """One replica. ``version``: of the settings it was started with, any number.

    ``arrived_tokens``: uncached prompt tokens that ever came, computed or queued; ``queued_tokens``: those of them that
    wait or are being computed. ``prefill_tokens_per_s``: 0 while unknown. ``running``, ``waiting``: sequences;
    ``slots``: how many can run. ``used_tokens``: of the pool, by running sequences; ``pinned_tokens``: by explicit
    saves, of ``pin_budget_tokens``; ``hands_over``: 1 where a replica that leaves gives them to others, else 0.
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
    """The settings in force: see ``AutoscalingConfig``."""

    min_replicas: float
    max_replicas: float
    target_ttft_s: float
    upscale_delay_s: float
    downscale_delay_s: float


@dataclass(frozen=True, slots=True)
class IngressFigures(Bounds):
    """One ingress, its settings and its router.

    ``requests``: it routed in the last minute, with the p90 of their estimated TTFT and of their own prefill, and the
    mean of the latter; ``waiting_requests``: not routed yet. ``working_set_tokens``: of blocks that are reused over and
    over.
    """

    requests: float
    p90_ttft_s: float
    p90_own_s: float
    mean_own_s: float
    waiting_requests: float
    working_set_tokens: float
