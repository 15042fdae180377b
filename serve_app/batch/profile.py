"""The figures of a run in Edge-LLM's shape. Pure arithmetic over what each request took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.batch.local_engine import Work


def profile(work: Mapping[int, Work]) -> dict[str, Any]:
    """Return reused and computed prompt tokens, and generated ones, in all and of each request by its index.

    Times are requests' own: of those that run together each counts whole. A generation's are from its first token on.
    """
    done = work.values()
    computed = sum(one.prompt_tokens - one.reused_tokens for one in done)
    prefill_s = sum(one.prefill_s for one in done)
    generated = sum(one.generated_tokens for one in done)
    generation_s = sum(one.generation_s for one in done)
    later = sum(max(0, one.generated_tokens - 1) for one in done)
    return {
        "prefill": {
            "total_runs": len(work),
            "reused_tokens": sum(one.reused_tokens for one in done),
            "computed_tokens": computed,
            "average_tokens_per_run": _ratio(computed, len(work)),
            "average_time_per_run_ms": _ratio(prefill_s * 1000, len(work)),
            "tokens_per_second": _ratio(computed, prefill_s),
            "average_time_per_token_ms": _ratio(prefill_s * 1000, computed),
        },
        "generation": {
            "total_runs": len(work),
            "generated_tokens": generated,
            "average_tokens_per_run": _ratio(generated, len(work)),
            "average_time_per_run_ms": _ratio(generation_s * 1000, len(work)),
            "tokens_per_second": _ratio(later, generation_s),
            "average_time_per_token_ms": _ratio(generation_s * 1000, later),
        },
        "requests": [
            {
                "request_idx": index,
                "reused_tokens": one.reused_tokens,
                "computed_tokens": one.prompt_tokens - one.reused_tokens,
                "generated_tokens": one.generated_tokens,
            }
            for index, one in sorted(work.items())
        ],
    }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 3) if whole else 0.0
