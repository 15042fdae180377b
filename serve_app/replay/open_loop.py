"""Open-loop load: requests are sent at their times, even if earlier ones have no answer yet.

Bounded: requests come from an iterator when they are due, and at most ``most_open`` connections are open. One that
finds all of them open waits for another's end, which counts as lateness.
"""

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np

from serve_app.replay.client import RequestFailed, TimedAnswer, stream_answer

REFUSED = (429, 503)
UNKNOWN = "unknown"
MOST_OPEN = 4096


@dataclass(frozen=True, slots=True)
class Shot:
    """One request of a tenant, sent ``at_s`` seconds after the start. ``number``: the sender's."""

    at_s: float
    path: str
    body: dict[str, Any]
    tenant: str = "default"
    api_key: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a shot that was sent ``late_s`` late, or the status (0: none) and reason of its failure."""

    shot: Shot
    late_s: float
    answer: TimedAnswer | None = None
    status: int = 200
    reason: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds from the planned time of sending to the first token."""
        assert self.answer is not None
        return self.late_s + self.answer.ttft_s

    def without_texts(self) -> "Result":
        """Return what is to be counted of it: without the bodies of request and answer."""
        answer = None if self.answer is None else replace(self.answer, text="")
        return replace(self, shot=replace(self.shot, body={}), answer=answer)


async def fire(url: str, shots: Sequence[Shot], timeout_s: float, progress: Callable[[], None]) -> list[Result]:
    """Send every shot at its time; return the results in the order of the shots."""
    results: dict[int, Result] = {}

    def take(result: Result) -> None:
        results[result.shot.number] = result
        progress()

    numbered = [replace(shot, number=number) for number, shot in enumerate(shots)]
    await send(url, sorted(numbered, key=lambda shot: shot.at_s), take, timeout_s=timeout_s)
    return [replace(results[number], shot=shot) for number, shot in enumerate(shots)]


async def send(
    url: str,
    shots: Iterable[Shot] | AsyncIterable[Shot],
    take: Callable[[Result], None],
    *,
    timeout_s: float,
    most_open: int = MOST_OPEN,
) -> None:
    """Send shots, in order of their times, each at its time; ``take`` each result when it is there."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    gate = asyncio.Semaphore(most_open)

    async def one(shot: Shot, started_s: float) -> None:
        late_s = max(0.0, time.perf_counter() - started_s - shot.at_s)
        headers = {"authorization": f"Bearer {shot.api_key}"} if shot.api_key else {}
        try:
            async with asyncio.timeout(timeout_s):
                answer = await stream_answer(client, url + shot.path, shot.body, headers)
            result = Result(shot, late_s, answer)
        except RequestFailed as error:
            result = Result(shot, late_s, None, error.status, str(error))
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError) as error:  # or it is no OpenAI stream
            result = Result(shot, late_s, None, 0, f"{type(error).__name__}: {error}")
        finally:
            gate.release()
        take(result)

    async with httpx.AsyncClient(timeout=timeout_s, limits=limits) as client, asyncio.TaskGroup() as tasks:
        started_s: float | None = None
        # Tasks are created at their time, so that a day's requests are not all tasks in memory from the start.
        async for shot in _each(shots):
            started_s = (
                time.perf_counter() if started_s is None else started_s
            )  # the first may have been made meanwhile
            await asyncio.sleep(max(0.0, shot.at_s - (time.perf_counter() - started_s)))
            await gate.acquire()
            tasks.create_task(one(shot, started_s))


async def _each(shots: Iterable[Shot] | AsyncIterable[Shot]) -> AsyncIterator[Shot]:
    if isinstance(shots, AsyncIterable):
        async for shot in shots:
            yield shot
    else:
        for shot in shots:
            yield shot


def hit_rate(answers: Sequence[TimedAnswer]) -> float | str:
    """Return the ratio of cached to all prompt tokens; "unknown" if the server does not report them."""
    counted = [answer for answer in answers if answer.reports_cached and answer.prompt_tokens]
    if not counted:
        return UNKNOWN
    return sum(answer.cached_tokens for answer in counted) / sum(answer.prompt_tokens for answer in counted)


def summary(results: Sequence[Result], ttft_slo_s: float) -> dict[str, Any]:
    """Return figures in seconds. ``goodput_rps``: answers per second with a first token within ``ttft_slo_s``."""
    answered = [result for result in results if result.answer is not None]
    refused = sum(result.status in REFUSED for result in results)
    figures: dict[str, Any] = {
        "requests": len(results),
        "answered": len(answered),
        "rejected": refused,
        "failed": len(results) - len(answered) - refused,
        "reasons": sorted({result.reason[:200] for result in results if result.reason})[:5],
        "late_p99_s": percentile([result.late_s for result in results], 99) if results else 0.0,
        "late_max_s": max((result.late_s for result in results), default=0.0),
    }
    if not answered:
        return figures
    answers = [result.answer for result in answered if result.answer is not None]
    ended_s = max(r.shot.at_s + r.late_s + r.answer.total_s for r in answered if r.answer is not None)
    tpot_s = [answer.tpot_s for answer in answers if answer.completion_tokens > 1]
    for name, values in (("ttft", [result.ttft_s for result in answered]), ("tpot", tpot_s)):
        if values:
            figures[f"{name}_mean_s"] = sum(values) / len(values)
            figures |= {f"{name}_p{percent}_s": percentile(values, percent) for percent in (50, 90, 99)}
    figures["prompt_tokens"] = sum(answer.prompt_tokens for answer in answers)
    figures["hit_rate"] = hit_rate(answers)
    good = sum(result.ttft_s <= ttft_slo_s for result in answered)
    figures["goodput_rps"] = good / (ended_s - min(result.shot.at_s for result in results))
    return figures


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the ``percent``-th percentile (0 to 100), linearly interpolated."""
    return float(np.percentile(values, percent))
