"""From what was seen to figures and verdicts. Pure; knows nothing of how anything was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.report import percentile
from benchmarks.isolation.hostile.raw_http import Reply
from benchmarks.isolation.hostile.watch import Seen

TTFT_FACTOR, TTFT_ALLOWANCE_S = 2.0, 0.5


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure has to reach; ``value`` None: there is none, and the bar is not held."""

    bar: str
    value: float | None
    held: bool

    def to_json(self) -> dict[str, Any]:
        """Return the bar with its verdict."""
        return {"bar": self.bar, "value": self.value, "held": self.held}


def at_least(bar: str, value: float | None, bound: float) -> Bar:
    """Return the verdict on a figure that must be ``bound`` or more."""
    return Bar(bar, value, value is not None and value >= bound)


def at_most(bar: str, value: float | None, bound: float | None) -> Bar:
    """Return the verdict on a figure that must be ``bound`` or less; a bound of None is never held."""
    return Bar(bar, value, value is not None and bound is not None and value <= bound)


def served_share(seen: Sequence[Seen]) -> float | None:
    """Return the share of requests that were answered with 200; None of none."""
    return sum(one.status == 200 for one in seen) / len(seen) if seen else None


def all_served(alone: list[Seen]) -> list[Seen]:
    """Return what was seen without an attack. Raises RuntimeError when requests failed: what follows proves nothing."""
    if not alone or any(one.status != 200 for one in alone):
        raise RuntimeError(f"without any attack requests were not served: {side(alone)['statuses']}")
    return alone


def ttft_percentile(seen: Sequence[Seen], percent: float) -> float | None:
    """Return a percentile of the time to first token of what was answered; None when nothing was."""
    answered = [one.ttft_s for one in seen if one.status == 200]
    return percentile(answered, percent) if answered else None


def longest_wait_s(seen: Sequence[Seen]) -> float:
    """Return the longest time until a request's end, whatever that was."""
    return max((one.wait_s for one in seen), default=math.inf)


def hit_rate(seen: Sequence[Seen]) -> float | None:
    """Return cached tokens over prompt tokens of what was answered; None when nothing was."""
    prompt_tokens = sum(one.prompt_tokens for one in seen)
    return sum(one.cached_tokens for one in seen) / prompt_tokens if prompt_tokens else None


def ratio(measured: float | None, against: float | None) -> float | None:
    """Return a ratio; None where a side is missing or there is nothing to divide by."""
    return measured / against if measured is not None and against else None


def side(seen: Sequence[Seen]) -> dict[str, Any]:
    """Return the figures of one phase of a watched tenant."""
    statuses = [one.status for one in seen]
    return {
        "requests": len(seen),
        "statuses": {str(status): statuses.count(status) for status in sorted(set(statuses))},
        "served_share": served_share(seen),
        "ttft_p50_s": ttft_percentile(seen, 50),
        "ttft_p99_s": ttft_percentile(seen, 99),
        "longest_wait_s": longest_wait_s(seen),
    }


def paired(alone: Sequence[Seen], under: Sequence[Seen]) -> dict[str, Any]:
    """Return what every scenario tells of the watched tenant; ``longest_wait_s`` is what is beyond alone."""
    alone_s, under_s = ttft_percentile(alone, 99), ttft_percentile(under, 99)
    return {
        "served_share": served_share(under),
        "ttft_p99_ratio": ratio(under_s, alone_s),
        "ttft_p99_allowed_s": _allowed_s(alone_s),
        "longest_wait_s": longest_wait_s(under) - longest_wait_s(alone),
        "alone": side(alone),
        "under": side(under),
    }


def ttft_bar(who: str, alone: Sequence[Seen], under: Sequence[Seen]) -> Bar:
    """Return the verdict on p99 TTFT under attack, in seconds."""
    alone_s, under_s = ttft_percentile(alone, 99), ttft_percentile(under, 99)
    bound_s = _allowed_s(alone_s)
    told = "?" if bound_s is None else f"{bound_s:.2f} s"
    return at_most(f"{who}: p99 TTFT <= {TTFT_FACTOR:g}x alone + {TTFT_ALLOWANCE_S:g} s = {told}", under_s, bound_s)


def windows(
    replies: Sequence[Reply], started_s: float, ended_s: float, window_s: float, of: Callable[[Reply], float]
) -> list[float]:
    """Return the sum of ``of`` over what ended in each whole window; what is left over at the end is no window."""
    sums = [0.0] * int((ended_s - started_s) / window_s)
    for reply in replies:
        number = math.floor((reply.ended_s - started_s) / window_s)
        if 0 <= number < len(sums):
            sums[number] += of(reply)
    return sums


def tokens_per_s(replies: Sequence[Reply], seen: Sequence[Seen], started_s: float, ended_s: float) -> float:
    """Return the generated tokens a second of whole answers that ended in that time, all tenants together."""
    ends = [(reply.ended_s, reply.completion_tokens) for reply in replies]
    ends += [(one.ended_s, one.completion_tokens) for one in seen]
    return sum(tokens for at_s, tokens in ends if started_s <= at_s <= ended_s) / (ended_s - started_s)


def verdict(figures: Mapping[str, Any], bars: Sequence[Bar]) -> dict[str, Any]:
    """Return a scenario's figures with its bars; ``held``: all of them, None where there is none."""
    held = all(bar.held for bar in bars) if bars else None
    return {**figures, "bars": [bar.to_json() for bar in bars], "held": held}


def _allowed_s(alone_s: float | None) -> float | None:
    return None if alone_s is None else TTFT_FACTOR * alone_s + TTFT_ALLOWANCE_S
