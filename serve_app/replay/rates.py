"""Rates of a replica: fitted to what a file recorded, or those of a named card and model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np
import numpy.typing as npt

from serve_app.replay.setup import Rates
from serve_app.traffic.record import RecordedModel

ENOUGH = 30
"""Fewer requests fit no rate."""
_BINS = 12
_QUIET = 0.2
"""The fastest part of like requests, which met no queue."""


@dataclass(frozen=True, slots=True)
class GpuCard:
    """A GPU: dense bfloat16 operations and bytes of memory a second, and bytes of memory. Source: its data sheet."""

    flops: float
    bytes_per_s: float
    memory_bytes: float


CARDS = {
    "b200": GpuCard(2250e12, 8.0e12, 180e9),
    "h200": GpuCard(989e12, 4.8e12, 141e9),
    "h100": GpuCard(989e12, 3.35e12, 80e9),
    "a100": GpuCard(312e12, 2.04e12, 80e9),
    "mi300x": GpuCard(1307e12, 5.3e12, 192e9),
    "l40s": GpuCard(362e12, 0.864e12, 48e9),
    "l4": GpuCard(121e12, 0.3e12, 24e9),
}
"""By the name of ``--card``."""
PREFILL_PART, DECODE_PART, POOL_PART = 0.45, 0.65, 0.9
"""What engines reach of a card's operations in prefill, of its bytes in decoding, and of its memory: assumptions."""
MEAN_CONTEXT_TOKENS = 4096
"""Assumed of a sequence that decodes, for the KV that each step reads."""


def card_rates(
    name: str, weights_bytes: int, dtype_bytes: int, bytes_per_token: int, cards: int = 1
) -> tuple[Rates, int]:
    """Return a replica's rates and pool tokens, with a model on ``cards`` cards. Raises ValueError for others."""
    card = CARDS.get(name.lower())
    if card is None:
        near = get_close_matches(name.lower(), CARDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(CARDS)}"
        raise ValueError(f"the card {name} is not known; {hint} Or give --prefill-rate and --decode-step-ms.")
    memory = card.memory_bytes * cards * POOL_PART - weights_bytes
    if memory <= 0:
        raise ValueError(f"the weights ({weights_bytes / 1e9:.0f} GB) do not fit {cards} x {name}: give more --cards")
    bytes_per_s = card.bytes_per_s * cards * DECODE_PART
    rates = Rates(
        prefill_tokens_per_s=PREFILL_PART * card.flops * cards / (2.0 * weights_bytes / dtype_bytes),
        decode_step_s=weights_bytes / bytes_per_s,
        decode_each_s=MEAN_CONTEXT_TOKENS * bytes_per_token / bytes_per_s,
    )
    return rates, int(memory / bytes_per_token)


def recorded_rates(
    facts: RecordedModel | None,
    uncached_tokens: npt.NDArray[Any],
    ttft_s: npt.NDArray[Any],
    output_tokens: npt.NDArray[Any],
    duration_s: npt.NDArray[Any],
) -> Rates | None:
    """Return the rates that a file tells or lets fit, or None. Arrays: by request, nan where a time is not known."""
    known = facts or RecordedModel()
    settings: Mapping[str, Any] = known.settings
    prefill, overhead_s = known.prefill_tokens_per_s, 0.0
    timed = ~np.isnan(ttft_s) & (uncached_tokens > 0)
    if timed.sum() >= ENOUGH:
        fitted, overhead_s = _line(uncached_tokens[timed], ttft_s[timed])
        if prefill:
            overhead_s = max(
                float(np.percentile(ttft_s[timed] - uncached_tokens[timed] / prefill, 100 * _QUIET / 2)), 0.0
            )
        else:
            prefill = fitted
    if prefill <= 0.0:
        return None
    step_s, each_s = max(known.decode_step_s - known.decode_each_s, 0.0), known.decode_each_s
    if not step_s:
        answered = timed & (output_tokens > 1) & ~np.isnan(duration_s)
        if answered.sum() >= ENOUGH:
            tokens_s = (duration_s[answered] - ttft_s[answered]) / (output_tokens[answered] - 1)
            step_s = float(np.percentile(tokens_s, 100 * _QUIET))
    return Rates(
        prefill_tokens_per_s=prefill,
        decode_step_s=step_s,
        decode_each_s=each_s,
        overhead_s=overhead_s,
        pull_tokens_per_s=known.pull_tokens_per_s,
        step_tokens=int(settings.get("max_num_batched_tokens") or Rates(1.0).step_tokens),
        max_num_seqs=known.max_num_seqs or int(settings.get("max_num_seqs") or Rates(1.0).max_num_seqs),
        max_itl_s=float(settings["max_itl_ms"]) / 1000.0 if settings.get("max_itl_ms") else float("inf"),
    )


def _line(tokens: npt.NDArray[Any], seconds: npt.NDArray[Any]) -> tuple[float, float]:
    """Return tokens a second and the seconds of none, by the quickest of requests of like length."""
    edges = np.unique(np.quantile(tokens, np.linspace(0.0, 1.0, _BINS + 1)))
    places = np.clip(np.searchsorted(edges, tokens, side="right") - 1, 0, max(len(edges) - 2, 0))
    xs, ys = [], []
    for place in np.unique(places):
        these = places == place
        quick = seconds[these] <= np.quantile(seconds[these], _QUIET)
        xs.append(float(tokens[these][quick].mean()))
        ys.append(float(seconds[these][quick].mean()))
    if len(xs) < 2:
        return (xs[0] / ys[0] if ys[0] > 0 else 0.0), 0.0
    slope, start_s = np.polyfit(xs, ys, 1)
    if slope <= 0.0:
        return 0.0, 0.0
    return 1.0 / float(slope), max(float(start_s), 0.0)


def with_rates(rates: Rates, prefill_tokens_per_s: float | None, decode_step_s: float | None) -> Rates:
    """Return rates with those that are given in place of the known ones."""
    if prefill_tokens_per_s is not None:
        rates = replace(rates, prefill_tokens_per_s=prefill_tokens_per_s)
    return replace(rates, decode_step_s=decode_step_s) if decode_step_s is not None else rates
