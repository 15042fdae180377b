"""The use of each prompt version at one ingress since its start, in bounded memory."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from router.protocol.samples import Sample


class Use(NamedTuple):
    """A kind of request for a prompt, with its own KV. ``tenant``: the latest. ``chat``: by the template, else text."""

    tenant: str
    model: str
    lora_name: str | None
    cache_salt: str | None
    chat: bool


class VersionCounts(NamedTuple):
    """The figures of one version. ``warm_requests``: requests that found all of it in the cache."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    warm_requests: int = 0

    def plus(self, other: VersionCounts) -> VersionCounts:
        """Return the sum of both."""
        return VersionCounts(*map(operator.add, self, other))

    def to_json(self) -> dict[str, Any]:
        """Return the figures for operators."""
        return {
            "requests": self.requests,
            "cold_requests": self.requests - self.warm_requests,
            "hit_rate": round(self.cached_tokens / self.prompt_tokens, 4) if self.prompt_tokens else None,
        }


class PromptTraffic:
    """Requests at one ingress by NAME@VERSION. ``least_tokens``: cached tokens that imply a fully cached version."""

    def __init__(self, least_tokens: Callable[[str], int] = lambda _: 1) -> None:
        self._least_tokens = least_tokens
        self._figures: dict[str, VersionCounts] = {}
        self._uses: dict[str, OrderedDict[Use, Use]] = {}

    def add(self, ref: str, prompt_tokens: int, cached_tokens: int) -> None:
        """Count one answered request."""
        warm = cached_tokens >= max(1, self._least_tokens(ref))
        counted = VersionCounts(1, prompt_tokens, cached_tokens, int(warm))
        self._figures[ref] = self._figures.get(ref, VersionCounts()).plus(counted)

    def add_use(self, ref: str, use: Use, *, public: bool) -> None:
        """Record a use of a prompt. A public prompt's KV is the same for all tenants and salts."""
        uses = self._uses.setdefault(ref.partition("@")[0], OrderedDict())
        way = use._replace(tenant="", cache_salt=None) if public else use
        uses[way] = use
        uses.move_to_end(way)
        if len(uses) > 16:
            uses.popitem(last=False)

    def report(self) -> tuple[dict[str, VersionCounts], dict[str, list[Use]]]:
        """Return the figures by version, and each name's uses, the latest last."""
        return dict(self._figures), {name: list(uses.values()) for name, uses in self._uses.items()}


def version_samples(report: Mapping[str, VersionCounts]) -> Iterable[Sample]:
    """Yield the tokens of each version."""
    for ref, figures in report.items():
        labels = (("prompt", ref),)
        yield "warmpath_prompt_version_tokens_total", labels, float(figures.prompt_tokens)
        yield "warmpath_prompt_version_cached_tokens_total", labels, float(figures.cached_tokens)


def merged(reports: Iterable[Mapping[str, VersionCounts]]) -> dict[str, VersionCounts]:
    """Return the summed figures of several ingresses."""
    totals: dict[str, VersionCounts] = {}
    for report in reports:
        for ref, figures in report.items():
            totals[ref] = totals.get(ref, VersionCounts()).plus(figures)
    return totals
