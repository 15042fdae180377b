"""What is counted of requests, and under which names; and what it would have cost elsewhere. Pure data."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import NamedTuple

from serve_app.config.usage import PricesConfig

WRITE_5M, WRITE_1H, READ = 1.25, 2.0, 0.1
"""What a prompt token costs that is written to the cache for five minutes or an hour, or read from it, as parts of one
that is neither. Source: Anthropic's prices of prompt caching."""


class UsageKey(NamedTuple):
    """``day``: YYYY-MM-DD in UTC; ``prompt``: NAME@VERSION that a request referred to, "" for none."""

    day: str
    tenant: str
    model: str
    prompt: str


@dataclass(slots=True)
class Counts:
    """Requests that had a first token, those of them that read from the cache, and their tokens.

    A prompt counts once, however many choices it has. ``written_tokens``: computed in whole blocks that stay cached.
    """

    requests: int = 0
    reused_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    output_tokens: int = 0

    def add(self, other: Counts) -> None:
        """Add what another has counted."""
        self.requests += other.requests
        self.reused_requests += other.reused_requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.written_tokens += other.written_tokens
        self.output_tokens += other.output_tokens

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens neither read from the cache nor written to it."""
        return self.prompt_tokens - self.cached_tokens - self.written_tokens

    def newest(self, other: Counts) -> Counts:
        """Return the later of two readings of the same counters: they only grow."""
        return Counts(*map(max, astuple(self), astuple(other)))


def costs(counts: Counts, prices: PricesConfig) -> dict[str, float]:
    """Return what it would have cost without any cache, under Anthropic's rules for both TTLs, and under OpenAI's."""
    cached, written, uncached = counts.cached_tokens, counts.written_tokens, counts.uncached_tokens
    inputs = {
        "without_cache": float(counts.prompt_tokens),
        "anthropic_5m": uncached + WRITE_5M * written + READ * cached,
        "anthropic_1h": uncached + WRITE_1H * written + READ * cached,
        "openai": uncached + written + prices.openai_cached_part * cached,
    }
    output = counts.output_tokens * prices.output_per_million
    return {rule: round((tokens * prices.input_per_million + output) / 1e6, 6) for rule, tokens in inputs.items()}
