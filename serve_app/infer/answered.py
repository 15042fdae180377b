"""What is known of one answered request of a file: its output line, its tokens and times, and why it missed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class AnsweredLine:
    """An answer or error. ``line``: in OpenAI's form. Times are None where they are not known.

    ``prefill_s``: from the start to the first token; ``decode_s``: from there to the last; ``total_s``: all.
    ``save``: what became of its save, "" if it asked for none; ``why``: of a miss.
    """

    line: dict[str, Any]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefill_s: float | None = None
    decode_s: float | None = None
    total_s: float = 0.0
    save: str = ""
    why: str = ""
    adapter: str = ""
    formatted_system_prompt: str | None = None
    formatted_request: str | None = None
    warning: str = ""

    @property
    def ok(self) -> bool:
        """Whether the request was answered."""
        return bool(self.line["response"]["status_code"] == 200)

    def debug_line(self) -> str:
        """Return a sentence for ``--debug``."""
        computed = self.prompt_tokens - self.cached_tokens
        kind = "hit" if self.cached_tokens else "miss"
        of = f" (adapter {self.adapter})" if self.adapter else ""
        said = f"{self.line['custom_id']}{of}: {kind}, {self.cached_tokens} prompt tokens reused, {computed} computed"
        return "; ".join(filter(None, (said, self.save, self.why)))


def profile(answered: Sequence[AnsweredLine]) -> dict[str, Any]:
    """Return figures of prefill and generation, in all and by request, in the form of TensorRT Edge-LLM's profile.

    Times are the requests' own: of those that run together each counts whole.
    """
    done = [one for one in answered if one.ok]
    computed = sum(one.prompt_tokens - one.cached_tokens for one in done)
    generated = sum(one.generated_tokens for one in done)
    timed = [one for one in done if one.prefill_s is not None]
    later = sum(max(0, one.generated_tokens - 1) for one in timed)
    return {
        "prefill": {
            "reused_tokens": sum(one.cached_tokens for one in done),
            "computed_tokens": computed,
            **_figures(len(done), computed, computed if timed else 0, sum(one.prefill_s or 0.0 for one in timed)),
        },
        "generation": {
            "generated_tokens": generated,
            **_figures(len(done), generated, later, sum(one.decode_s or 0.0 for one in timed)),
        },
        "requests": [
            {
                "request": one.line["custom_id"],
                "reused_tokens": one.cached_tokens,
                "computed_tokens": one.prompt_tokens - one.cached_tokens,
                "generated_tokens": one.generated_tokens,
                "prefill_ms": _ms(one.prefill_s),
                "generation_ms": _ms(one.decode_s),
                "total_ms": _ms(one.total_s),
            }
            for one in answered
        ],
    }


def _figures(runs: int, tokens: int, timed_tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "total_runs": runs,
        "average_tokens_per_run": _ratio(tokens, runs),
        "average_time_per_run_ms": _ratio(seconds * 1000, runs),
        "tokens_per_second": _ratio(timed_tokens, seconds),
        "average_time_per_token_ms": _ratio(seconds * 1000, timed_tokens),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 3) if whole else 0.0
