"""From results and samples to figures: what was lost, what a change did to hits and times, what it all cost.

Pure; times in seconds of the run. A figure that a run has nothing for is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.common.client import Answer
from benchmarks.common.open_loop import UNKNOWN, Result, hit_rate
from benchmarks.common.report import percentile
from benchmarks.end_to_end.autoscale.scenarios import Span
from benchmarks.end_to_end.autoscale.stage import Run, Sample

FIRST_REQUESTS = 100
"""Of a new replica, on which its hit rate is compared with the others'."""
CURVE_WINDOW_S = 10.0
_LEAST_REQUESTS = 20
"""Fewer say nothing."""
_SILENCE_STEPS = 3.0
"""A stream that was silent around a kill for no more than so many decode steps was running elsewhere."""


def figures_of(
    run: Run,
    undisturbed: Sequence[Answer],
    spans: Sequence[Span],
    window_s: float,
    prefill_tokens_per_s: float,
    step_s: float,
) -> dict[str, Any]:
    """Return the figures of one arm.

    ``undisturbed``: what the answers must be, and what a cache without a limit would have had of their prompts;
    ``window_s``: how long before and after a change is compared. A change's ratio is the worst of several. The rates
    say what a cold prompt would take.
    """
    lost = [result for result in run.results if result.answer is None]
    altered = sum(
        result.answer is not None and result.answer.text != right.text
        for result, right in zip(run.results, undisturbed, strict=True)
    )
    names = [(span.name, _between(run.results, span.start_s, span.end_s)) for span in spans]
    joins = joined(run.samples)
    forced = [at_s for at_s, action in run.actions if action in ("kill", "update")]
    grown = [join for join in joins if not any(at_s <= join[0] for at_s in forced)]
    killed = [at_s for at_s, action in run.actions if action == "kill"]
    resumed = [ratio for at_s in killed for ratio in resumes(run.results, at_s, prefill_tokens_per_s, step_s)]
    steady = [result for name, results in names if name == "plateau" for result in results]
    return {
        **_seen(run.results),
        "requests_lost": len(lost) + altered,
        "unanswered": len(lost),
        "altered": altered,
        "reasons": sorted({result.reason[:200] for result in lost})[:5],
        "late_max_s": max((result.late_s for result in run.results), default=0.0),
        "replica_seconds": replica_seconds(run.samples),
        "scale_downs": len(left(run)),
        "scale_ups": len(grown),
        "hit_rate_after_scale_down_ratio": _worst(min, (
            _ratio(_hits, _between(run.results, at_s, at_s + window_s), _between(run.results, at_s - window_s, at_s))
            for at_s in left(run)
        )),
        "hit_rate_after_scale_down_of_unlimited_ratio": _worst(min, (
            _of_unlimited(run.results, undisturbed, at_s, window_s) for at_s in left(run)
        )),
        "ttft_p99_after_scale_up_ratio": _worst(max, (
            _ratio(_p99_s, _between(run.results, at_s, at_s + window_s), steady) for at_s, _ in grown
        )),
        "new_replica_hit_ratio": _worst(min, (new_replica_hit_ratio(run.samples, *join) for join in grown)),
        "replacement_hit_ratio": _worst(
            min, (new_replica_hit_ratio(run.samples, *join) for join in joins if join not in grown)
        ),
        "resumed_streams": len(resumed),
        "resume_p99_ratio": percentile(resumed, 99) if resumed else None,
        "scenarios": {name: _seen(results) for name, results in names},
    }  # fmt: skip


def curves(run: Run, end_s: float) -> dict[str, Any]:
    """Return what a picture shows: replicas by state each second, and by window what was offered and answered."""
    windows = []
    for number in range(int(end_s // CURVE_WINDOW_S)):
        start_s = number * CURVE_WINDOW_S
        seen = _seen(_between(run.results, start_s, start_s + CURVE_WINDOW_S))
        windows.append(
            {"at_s": start_s + CURVE_WINDOW_S / 2, "offered_per_s": seen["requests"] / CURVE_WINDOW_S, **seen}
        )
    replicas = [{"at_s": round(sample.at_s, 2), **sample.states} for sample in run.samples]
    return {"actions": run.actions, "replicas": replicas, "windows": windows}


def joined(samples: Sequence[Sample]) -> list[tuple[float, str]]:
    """Return when each replica was first counted, and its id, but for those there from the start."""
    told = [sample for sample in samples if sample.counted]
    known = set(told[0].counted) if told else set()
    found = []
    for sample in told[1:]:
        new = sorted(set(sample.counted) - known)
        known.update(new)
        found += [(sample.at_s, name) for name in new]
    return found


def shrunk(samples: Sequence[Sample]) -> list[float]:
    """Return when replicas began to stop."""
    stopping = [(sample.at_s, sample.states.get("STOPPING", 0)) for sample in samples]
    return [at_s for (_, before), (at_s, now) in pairwise(stopping) if now > before]


def left(run: Run) -> list[float]:
    """Return when a replica less was wanted: as the scenario had it, else as a rule did, before anything was forced."""
    told = [at_s for at_s, action in run.actions if action in ("shrink", "shrink_to_one")]
    forced = min((at_s for at_s, action in run.actions if action in ("kill", "update")), default=float("inf"))
    return told or [at_s for at_s in shrunk(run.samples) if at_s < forced]


def replica_seconds(samples: Sequence[Sample]) -> float:
    """Return how long replicas were there in all, starting and stopping ones too."""
    return sum(sum(now.states.values()) * (after.at_s - now.at_s) for now, after in pairwise(samples))


def new_replica_hit_ratio(samples: Sequence[Sample], joined_s: float, name: str) -> float | None:
    """Return the hit rate of a new replica's first requests over that of the others in the same time."""
    later = [sample for sample in samples if sample.at_s >= joined_s and name in sample.counted]
    if not later:
        return None
    enough = (sample for sample in later if sample.counted[name]["requests"] >= FIRST_REQUESTS)
    first, last = later[0], next(enough, later[-1])
    new = last.counted[name]
    olds = [other for other in first.counted if other != name and other in last.counted]
    prompt_tokens, cached_tokens = (
        sum(last.counted[other][field] - first.counted[other][field] for other in olds)
        for field in ("prompt_tokens", "cached_tokens")
    )
    if new["requests"] < _LEAST_REQUESTS or not cached_tokens:
        return None
    return new["cached_tokens"] / new["prompt_tokens"] / (cached_tokens / prompt_tokens)


def resumes(results: Iterable[Result], killed_s: float, prefill_tokens_per_s: float, step_s: float) -> list[float]:
    """Return, for each stream that a kill interrupted, its silence over a cold TTFT of its prompt."""
    found = []
    for result in results:
        answer = result.answer
        if answer is None:
            continue
        silent_s = result.shot.at_s + result.late_s + answer.gap_at_s
        if silent_s <= killed_s <= silent_s + answer.gap_s and answer.gap_s > _SILENCE_STEPS * step_s:
            found.append((silent_s + answer.gap_s - killed_s) / (answer.prompt_tokens / prefill_tokens_per_s + step_s))
    return found


def _between(results: Iterable[Result], start_s: float, end_s: float) -> list[Result]:
    return [result for result in results if start_s <= result.shot.at_s < end_s]


def _seen(results: Sequence[Result]) -> dict[str, Any]:
    answers = [result.answer for result in results if result.answer is not None]
    times_s = [result.ttft_s for result in results if result.answer is not None]
    figures: dict[str, Any] = {"requests": len(results), "hit_rate": hit_rate(answers)}
    if times_s:
        figures |= {f"ttft_p{percent}_s": percentile(times_s, percent) for percent in (50, 90, 99)}
    return figures


def _hits(results: Sequence[Result]) -> float | None:
    rate = hit_rate([result.answer for result in results if result.answer is not None])
    return None if rate == UNKNOWN else float(rate)


def _of_unlimited(
    results: Sequence[Result], undisturbed: Sequence[Answer], at_s: float, window_s: float
) -> float | None:
    """Return the ratio of hit rates after and before, over that which other prompts alone would have made of it."""

    def share(start_s: float, end_s: float) -> float | None:
        pairs = [
            (result.answer, best)
            for result, best in zip(results, undisturbed, strict=True)
            if start_s <= result.shot.at_s < end_s and result.answer is not None
        ]
        got, most = hit_rate([answer for answer, _ in pairs]), hit_rate([best for _, best in pairs])
        if len(pairs) < _LEAST_REQUESTS or UNKNOWN in (got, most) or not most:
            return None
        return float(got) / float(most)

    after, before = share(at_s, at_s + window_s), share(at_s - window_s, at_s)
    return after / before if after is not None and before else None


def _p99_s(results: Sequence[Result]) -> float | None:
    times_s = [result.ttft_s for result in results if result.answer is not None]
    return percentile(times_s, 99) if times_s else None


def _ratio(
    of: Callable[[Sequence[Result]], float | None], after: Sequence[Result], before: Sequence[Result]
) -> float | None:
    if min(len(after), len(before)) < _LEAST_REQUESTS:
        return None
    above, below = of(after), of(before)
    return above / below if above is not None and below else None


def _worst(worst: Callable[[list[float]], float], ratios: Iterable[float | None]) -> float | None:
    found = [ratio for ratio in ratios if ratio is not None]
    return worst(found) if found else None
