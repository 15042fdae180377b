"""How each version of a prompt is used: reuse and times to first token, and in which ways it is asked for.

One ingress' view since it started, in bounded memory; knows no texts. ``merged`` puts several ingresses' together.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from router.protocol.samples import Sample

MIN_WARM = 5
"""Fewer warm requests than this have no typical time to first token."""

_TIMES = 256
_USES = 16
_VERSIONS = 1024

K = TypeVar("K")
V = TypeVar("V")


class Use(NamedTuple):
    """A way to ask for a prompt, under which its KV lies apart from that of others.

    ``tenant``: who did so last; ``chat``: through the chat template, else as bare text.
    """

    tenant: str
    model: str
    lora_name: str | None
    cache_salt: str | None
    chat: bool


@dataclass(slots=True)
class Figures:
    """Of one version. ``warm_ttft_s``: of requests that found all of it in the cache, the latest ones."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    warm_requests: int = 0
    warm_ttft_s: deque[float] = field(default_factory=deque)

    def add(self, other: Figures) -> None:
        """Add what another has counted."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.warm_requests += other.warm_requests
        self.warm_ttft_s.extend(other.warm_ttft_s)

    def to_json(self) -> dict[str, Any]:
        """Return what an operator is shown; times only where there are enough."""
        p50 = p99 = None
        if len(self.warm_ttft_s) >= MIN_WARM:
            p50, p99 = np.percentile(self.warm_ttft_s, (50, 99)).round(4).tolist()
        return {
            "requests": self.requests,
            "cold_requests": self.requests - self.warm_requests,
            "hit_rate": round(self.cached_tokens / self.prompt_tokens, 4) if self.prompt_tokens else None,
            "warm_ttft_p50_s": p50,
            "warm_ttft_p99_s": p99,
        }


class PromptTraffic:
    """What came to one ingress, by NAME@VERSION.

    ``least_tokens``: how many cached tokens say that all of a version was cached.
    """

    def __init__(self, least_tokens: Callable[[str], int] = lambda _: 1) -> None:
        self._least_tokens = least_tokens
        self._figures: OrderedDict[str, Figures] = OrderedDict()
        self._uses: OrderedDict[str, OrderedDict[Use, Use]] = OrderedDict()

    def add(self, ref: str, prompt_tokens: int, cached_tokens: int, ttft_s: float) -> None:
        """Count one answered request."""
        warm = [ttft_s] if cached_tokens >= max(1, self._least_tokens(ref)) else []
        figures = self._figures.get(ref) or Figures(warm_ttft_s=deque(maxlen=_TIMES))
        figures.add(Figures(1, prompt_tokens, cached_tokens, len(warm), deque(warm)))
        _put(self._figures, ref, figures, _VERSIONS)

    def add_use(self, ref: str, use: Use, *, public: bool) -> None:
        """Remember how a prompt is asked for; of a public one KV is the same for all tenants and salts."""
        name = ref.partition("@")[0]
        uses = self._uses.get(name) or OrderedDict()
        _put(uses, use._replace(tenant="", cache_salt=None) if public else use, use, _USES)
        _put(self._uses, name, uses, _VERSIONS)

    def report(self) -> tuple[dict[str, Figures], dict[str, list[Use]]]:
        """Return the figures by version, and the ways each name is asked for, the latest last."""
        return dict(self._figures), {name: list(uses.values()) for name, uses in self._uses.items()}


def _put(table: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Put a value at a table's end; the first one goes where there are too many."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)


def version_samples(report: Mapping[str, Figures]) -> Iterable[Sample]:
    """Yield the tokens of each version."""
    for ref, figures in report.items():
        labels = (("prompt", ref),)
        yield "warmpath_prompt_version_tokens_total", labels, float(figures.prompt_tokens)
        yield "warmpath_prompt_version_cached_tokens_total", labels, float(figures.cached_tokens)


def merged(reports: Iterable[Mapping[str, Figures]]) -> dict[str, Figures]:
    """Return the figures of several ingresses as one's."""
    totals: dict[str, Figures] = {}
    for report in reports:
        for ref, figures in report.items():
            totals.setdefault(ref, Figures()).add(figures)
    return totals
