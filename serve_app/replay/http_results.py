"""What a replay over HTTP measured: figures of all and each tenant beside what the file recorded; a bar, a table."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from serve_app.replay.open_loop import REFUSED, Result, hit_rate, percentile
from serve_app.replay.over_http import HttpResults
from serve_app.traffic.workload import Column, Workload

PERCENTS = (50, 90, 99)
MOST_REASONS = 5
LATE_S = 0.1
"""What is told as late."""


def http_figures(found: HttpResults) -> dict[str, Any]:
    """Return the figures, JSON-able; of each tenant, too, if there are several. Times in seconds.

    ``recorded``: the same of the file's requests. ``other_prompt_tokens``: the answers whose prompts the server counted
    otherwise than the file, and the most tokens of difference; both are 0 in an exact replay.
    """
    workload, rows = found.workload, np.asarray(found.rows)
    figures = {**_measured(found, found.results), "recorded": _recorded(workload, rows)}
    figures |= {"interrupted": found.interrupted, "notes": [*found.notes, *_late(figures["late_p99_s"])]}
    results: dict[str, list[Result]] = {}
    for result in found.results:
        results.setdefault(result.shot.tenant, []).append(result)
    tenants = np.unique(workload.tenant[rows])
    if len(tenants) > 1:
        figures["tenants"] = {
            workload.tenants[tenant]: {
                **_measured(found, results.get(workload.tenants[tenant], [])),
                "recorded": _recorded(workload, rows[workload.tenant[rows] == tenant]),
            }
            for tenant in tenants
        }
    return figures


def _measured(found: HttpResults, results: Sequence[Result]) -> dict[str, Any]:
    answers = [(result, result.answer) for result in results if result.answer is not None]
    refused = sum(result.status in REFUSED for result in results)
    reasons = Counter(_kind_of(result.reason) for result in results if result.reason)
    figures: dict[str, Any] = {
        "requests": len(results),
        "answered": len(answers),
        "refused": refused,
        "failed": len(results) - len(answers) - refused,
        "reasons": dict(reasons.most_common(MOST_REASONS)),
        "late_p99_s": percentile([result.late_s for result in results], 99) if results else 0.0,
    }
    figures |= spread_of("ttft", [result.ttft_s for result, _ in answers])
    figures |= spread_of("tpot", [answer.tpot_s for _, answer in answers if answer.completion_tokens > 1])
    prompts, outputs = (
        sum(getattr(answer, name) for _, answer in answers) for name in ("prompt_tokens", "completion_tokens")
    )
    expected = [int(found.workload.prompt_tokens[found.rows[result.shot.number]]) for result, _ in answers]
    off = [answer.prompt_tokens - tokens for (_, answer), tokens in zip(answers, expected, strict=True)]
    off = [abs(tokens) for tokens, (_, answer) in zip(off, answers, strict=True) if tokens and answer.prompt_tokens]
    figures |= {
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "cached_tokens": sum(answer.cached_tokens for _, answer in answers),
        "hit_rate": hit_rate([answer for _, answer in answers]),
        "other_prompt_tokens": {"answers": len(off), "most": max(off, default=0)},
    }
    if answers:
        begun_s = min(result.shot.at_s for result in results)
        took_s = max(result.shot.at_s + result.late_s + answer.total_s for result, answer in answers) - begun_s
        figures |= {"seconds": took_s, "tokens_per_s": (prompts + outputs) / took_s if took_s else 0.0}
    return figures


def _late(p99_s: float) -> list[str]:
    """Return what lateness means, if there is any to speak of."""
    if p99_s < LATE_S:
        return []
    why = "this machine is too slow for the file's rate, or too few connections may be open"
    return [f"Requests were sent up to {p99_s:.1f} s late (p99): {why}. TTFTs count from the file's times."]


def _kind_of(reason: str) -> str:
    """Return a reason without what is of one request alone, so that equal ones are counted together."""
    status, colon, text = reason.partition(": ")
    return (status + colon + re.sub(r"\d+", "N", text))[:200]


def _recorded(workload: Workload, rows: Column) -> dict[str, Any]:
    """Return what the file says of the same requests, where it says it."""
    outputs, prompts, cached = (
        column[rows] for column in (workload.output_tokens, workload.prompt_tokens, workload.cached_tokens)
    )
    ttft_s, duration_s = workload.ttft_s[rows], workload.duration_s[rows]
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot_s = np.where(outputs > 1, (duration_s - ttft_s) / (outputs - 1), np.nan)
    told = cached >= 0
    read = int(prompts[told].sum())
    return {
        "requests": len(rows),
        **spread_of("ttft", ttft_s[~np.isnan(ttft_s)].tolist()),
        **spread_of("tpot", tpot_s[~np.isnan(tpot_s)].tolist()),
        "prompt_tokens": int(prompts.sum()),
        "output_tokens": int(outputs.sum()),
        **({"hit_rate": int(cached[told].sum()) / read} if read else {}),
    }


def spread_of(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return the mean and percentiles of times, nothing of none."""
    if not seconds:
        return {}
    percentiles = {f"{name}_p{percent}_s": percentile(seconds, percent) for percent in PERCENTS}
    return {f"{name}_mean_s": sum(seconds) / len(seconds), **percentiles}


class HttpProgress:
    """A bar of a replay: what was sent, answered, failed, and how late the latest was sent. Its call is ``told``."""

    def __init__(self, total: int, console: Console) -> None:
        shown = "{task.completed}/{task.total} sent, {task.fields[answered]} answered, {task.fields[failed]} failed"
        columns = (BarColumn(), TextColumn(shown), TextColumn("{task.fields[late]}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._bar = self._progress.add_task("replay", total=total, answered=0, failed=0, late="")
        self._answered = self._failed = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, sent: int, result: Result | None) -> None:
        """Show that so many were sent, and a result."""
        if result is None:
            self._progress.update(self._bar, completed=sent)
            return
        self._answered += result.answer is not None
        self._failed += result.answer is None
        late = f"{result.late_s:.1f} s late" if result.late_s >= LATE_S else ""
        self._progress.update(self._bar, answered=self._answered, failed=self._failed, late=late)


_ROWS = (
    ("requests", "requests"), ("answered", "answered"), ("refused", "refused"), ("failed", "failed"),
    ("sent late, p99", "late_p99_s"),
    *((f"TTFT {which}", f"ttft_{which}_s") for which in ("mean", "p50", "p90", "p99")),
    *((f"TPOT {which}", f"tpot_{which}_s") for which in ("mean", "p50", "p99")),
    ("prompt tokens", "prompt_tokens"), ("from the cache", "hit_rate"), ("output tokens", "output_tokens"),
    ("tokens/s, both", "tokens_per_s"),
)  # fmt: skip


def http_table(figures: Mapping[str, Any]) -> Table:
    """Return the figures of all beside the file's, then one row a tenant."""
    table = Table("", "replayed", "recorded")
    for title, name in _ROWS:
        table.add_row(title, _shown(name, figures.get(name)), _shown(name, figures["recorded"].get(name)))
    for tenant, row in figures.get("tenants", {}).items():
        table.add_row(f"tenant {tenant or '(none)'}", _line(row), _line(row["recorded"]))
    return table


def _line(row: Mapping[str, Any]) -> str:
    mean, hits = (_shown(name, row.get(name)) for name in ("ttft_mean_s", "hit_rate"))
    counts = f"{row['answered']}/{row['requests']} answered" if "answered" in row else f"{row['requests']} requests"
    return f"{counts}, TTFT {mean or '-'}, cached {hits or '-'}"


def _shown(name: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if name.endswith("_s") and name != "tokens_per_s":
        return f"{1000 * value:.1f} ms" if value < 1.0 else f"{value:.2f} s"
    return f"{value:.1%}" if name == "hit_rate" else f"{value:,.0f}"
