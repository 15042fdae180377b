"""What a workload holds, in a few figures: of all requests, and of each model and tenant."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from serve_app.traffic.workload import Workload, reusable_tokens

MOST_PARTS = 50
"""Models and tenants that are told, those with most prompt tokens first."""


def summary_of(workload: Workload) -> dict[str, Any]:
    """Return the figures, ready for JSON."""
    reusable = reusable_tokens(
        workload.prompt_tokens, workload.paths, workload.path_start, workload.sizes, workload.block_tokens
    )
    prompt_tokens = int(workload.prompt_tokens.sum(dtype=np.int64))
    told = workload.cached_tokens >= 0
    cached = int(workload.cached_tokens[told].sum(dtype=np.int64)) / max(1, int(workload.prompt_tokens[told].sum()))
    started = datetime.fromtimestamp(workload.started_s, UTC).isoformat(timespec="seconds")
    return {
        "requests": len(workload),
        "refused": workload.refused,
        "span_s": float(workload.arrival_s[-1]),
        "started": started if workload.started_s > 1e9 else "an unknown time",
        "block_tokens": workload.block_tokens,
        "prompt_tokens": prompt_tokens,
        "output_tokens": int(workload.output_tokens.sum(dtype=np.int64)),
        "reusable": int(reusable.sum()) / max(1, prompt_tokens),
        "cached": cached if told.any() else None,
        "rates": _rates(workload),
        "parts": _parts(workload, reusable),
        "warnings": list(workload.warnings),
    }


def _rates(workload: Workload) -> str:
    known = sorted(name for name, facts in workload.facts.items() if facts.prefill_tokens_per_s)
    if known:
        return f"rates of a replica are known for {', '.join(known)}"
    if np.isfinite(workload.ttft_s).any():
        return "rates of a replica are not told; times are, so `warmpath replay` can fit them"
    return "rates of a replica are not told: `warmpath replay` needs --card and --model, or --prefill-rate"


def _parts(workload: Workload, reusable: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
    width = max(len(workload.tenants), 1)
    keys, place = np.unique(workload.model.astype(np.int64) * width + workload.tenant, return_inverse=True)
    prompt_tokens = np.bincount(place, workload.prompt_tokens)
    parts = []
    for number in np.argsort(-prompt_tokens, kind="stable")[:MOST_PARTS]:
        rows = place == number
        ttft_s = workload.ttft_s[rows]
        ttft_s = ttft_s[np.isfinite(ttft_s)]
        p50, p99 = np.percentile(ttft_s, [50, 99]).tolist() if len(ttft_s) else (None, None)
        model, tenant = divmod(int(keys[number]), width)
        parts.append(
            {
                "name": f"{workload.models[model]} / {workload.tenants[tenant]}",
                "model": workload.models[model],
                "tenant": workload.tenants[tenant],
                "requests": int(rows.sum()),
                "prompt_tokens": int(prompt_tokens[number]),
                "reusable": int(reusable[rows].sum()) / max(1, int(prompt_tokens[number])),
                "ttft_p50_s": p50,
                "ttft_p99_s": p99,
            }
        )
    return parts
