"""The running requests of an engine outside of this process, and its load, as far as submissions and tokens show it.

vLLM also reports each step's prompt tokens. They are credited to the oldest prefills, until the first token of a
request shows that they were its own: only tenants' turns and priorities change that order. The engine's lock guards it.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, filterfalse
from typing import Any, Protocol

from router.protocol.events import LoadReport
from router.protocol.samples import Labels, Sample
from serve_app.engine.protocol import EngineRequest, OutputSink, Prefilled, QueueFull, SaveResult
from serve_app.engine.reports import EngineMeters, LoadReports, retry_after_s
from serve_app.engine.scheduling.fair_queue import FairQueue
from serve_app.fairness.queue import YIELDING_ORDER
from serve_app.fairness.shares import Budget, Shares


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between its submission and its end. ``params``: fields of vLLM's ``SamplingParams``.

    ``uncached_tokens``: prompt tokens still to be computed; ``taken_tokens``: those credited to it by steps;
    ``predicted_tokens``: those cached by the engine's events when it came. ``save``: the result of its save.
    ``woken``: set when the KV that it waits for may have arrived. ``unsure_s``: the time of a prefill whose computed
    tokens are not told before the end, 0 for others.
    """

    request: EngineRequest
    sink: OutputSink
    params: Mapping[str, Any]
    arrival_s: float
    uncached_tokens: int
    predicted_tokens: int = 0
    taken_tokens: int = 0
    begun: bool = False
    ended: bool = False
    save: SaveResult | None = None
    task: asyncio.Task[None] | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    unsure_s: float = 0.0

    @property
    def prefilled(self) -> Prefilled:
        """What was done for the prompt so far, by the steps' prompt tokens until its first token."""
        tokens = len(self.request.token_ids) - self.uncached_tokens
        return Prefilled(tokens, tokens - self.taken_tokens)


class LoadSettings(Protocol):
    """The bounds of an engine's load, by the names of settings."""

    @property
    def tenant_shares(self) -> Mapping[str, float]: ...  # noqa: D102
    @property
    def max_num_seqs(self) -> int: ...  # noqa: D102
    @property
    def max_num_batched_tokens(self) -> int: ...  # noqa: D102
    @property
    def max_waiting_requests(self) -> int: ...  # noqa: D102


class LoadMirror:
    """Queued prefill tokens in total and by router. A request counts from its submission to its first token.

    It also counts as queued until then, because such engines report no more about a request. ``live``: all by id;
    ``left``: those left before their first token, which the step in progress may still compute.
    """

    def __init__(self, settings: LoadSettings, meters: EngineMeters, *, turns: bool = True) -> None:
        """``turns``: whether waiting tenants take turns; False: first come, first served."""
        shares, limit = Shares(settings.tenant_shares), "max_waiting_requests"
        self.line = Budget(shares, lambda: settings.max_waiting_requests, limit, "engine")
        self._turns = turns
        self._turn_tokens = FairQueue(settings.max_num_batched_tokens).quantum_tokens
        self._meters = meters
        self.live: dict[str, LiveRequest] = {}
        self.left: list[LiveRequest] = []
        self._prefills: dict[str, LiveRequest] = {}
        self._reports = LoadReports(settings.max_num_seqs, settings.max_waiting_requests, lambda: meters.prefill_rate)
        self._running = 0
        self._copies = 0
        self.kv_usage = 0.0

    @property
    def running(self) -> int:
        """Running sequences, as of the last step."""
        return min(self._running, len(self.live))

    @property
    def waiting(self) -> int:
        """Live requests that did not run in the last step."""
        return len(self.live) - self.running

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to be computed."""
        return sum(prefill.uncached_tokens for prefill in self._prefills.values())

    def check(self, tenant: str) -> None:
        """Raise QueueFull if the queue is full for a tenant."""
        self.line.shares.touch(tenant)
        if self.line.verdict(tenant, 1) != "granted":
            wait_s = retry_after_s(self.queued_tokens, self._meters.prefill_tokens_per_s)
            raise QueueFull(self.line.reason(tenant), wait_s)

    def arrived(self, live: LiveRequest) -> None:
        """Count a checked request."""
        request = live.request
        self.live[request.request_id] = self._prefills[request.request_id] = live
        self._reports.arrived(request.decision)
        self.line.take(request.tenant, 1)

    def copies(self) -> None:
        """Note that a copy of KV is about to be submitted: a request of one token that belongs to no prompt."""
        self._copies += 1

    def stepped(self, running: int, kv_usage: float, prompt_tokens: int, duration_s: float) -> None:
        """Subtract a step's prompt tokens from the oldest prefills. The excess counts as computed again.

        ``running``: sequences after the step; ``kv_usage``: part of the pool in use. ``duration_s`` 0: none computed.
        """
        self._running, self.kv_usage = running, kv_usage
        if not duration_s:
            return
        copies = min(prompt_tokens, self._copies)
        self._copies -= copies
        prompt_tokens -= copies
        left = prompt_tokens
        prefills: Iterable[LiveRequest] = self._prefills.values()
        if self.left:
            prefills = sorted([*self.left, *prefills], key=lambda live: live.arrival_s)
        for prefill in chain(filterfalse(self._yields, prefills), filter(self._yields, prefills)):
            taken = min(left, prefill.uncached_tokens)
            prefill.uncached_tokens -= taken
            prefill.taken_tokens += taken
            left -= taken
            if not left:
                break
        self._meters.computed_prompt_tokens += prompt_tokens - left
        self._meters.recomputed_tokens += left
        if prompt_tokens or not copies:  # a copy's step does not show how fast this machine computes
            self._meters.stepped(prompt_tokens, duration_s)

    def begun(self, live: LiveRequest, cached_tokens: int) -> None:
        """Note that a request has its first token: all of its prompt but ``cached_tokens`` was computed."""
        self._leave(live)
        own = len(live.request.token_ids) - cached_tokens - live.taken_tokens
        for other in self._prefills.values():
            given = max(0, min(own, other.taken_tokens))
            other.uncached_tokens += given
            other.taken_tokens -= given
            own -= given
        live.uncached_tokens, live.taken_tokens = 0, len(live.request.token_ids) - cached_tokens

    def ended(self, live: LiveRequest, *, left: bool = False) -> None:
        """Note that a request is no longer live. ``left``: by its client."""
        if left and not live.begun:
            self.left.append(live)
        self._leave(live)
        live.ended = True
        del self.live[live.request.request_id]

    def _yields(self, prefill: LiveRequest) -> bool:
        return self._turns and prefill.request.order >= YIELDING_ORDER

    def _leave(self, live: LiveRequest) -> None:
        live.begun = True
        if self._prefills.pop(live.request.request_id, None) is not None:
            self.line.give_back(live.request.tenant, 1)

    def report(self, now_s: float) -> LoadReport:
        """Return the load as one message, without prompts that yield to whoever comes."""
        prefills = list(filterfalse(self._yields, self._prefills.values()))
        queued = sum(prefill.uncached_tokens for prefill in prefills)
        turns = self._turns and self.line.shares.several
        overtaken = list(filter(_overtaken, prefills))
        later, yielding = sum(prefill.uncached_tokens for prefill in overtaken), len(self._prefills) - len(prefills)
        committed = self._committed(prefills) if turns else queued - later
        ahead = 0 if turns else max(0, self.waiting - yielding - len(overtaken))
        return self._reports.report(
            now_s,
            queued_tokens=queued,
            running=self.running,
            waiting=self.waiting,
            committed=(committed, ahead),
        )

    def _committed(self, prefills: Iterable[LiveRequest]) -> int:
        """Return the tokens computed before a short request that arrives now, the least over all tenants.

        A tenant with a queue waits for its own queue; another tenant waits for at most one turn of each.
        """
        queued: Counter[str] = Counter()
        ahead: Counter[str] = Counter()
        for prefill in prefills:
            queued[prefill.request.tenant] += prefill.uncached_tokens
            ahead[prefill.request.tenant] += 0 if _overtaken(prefill) else prefill.uncached_tokens
        turns = sum(min(tokens, self._turn_tokens) for tokens in queued.values())
        return min([turns, *ahead.values()])

    def gauges(self, num_blocks: int, held_blocks: int, pinned_blocks: int, labels: Labels) -> Iterable[Sample]:
        """Yield the numbers of running and waiting requests, and the pool's blocks by state.

        ``held_blocks``: those that hold a prefix. vLLM reports which part of the pool is in use, but not whether it is
        indexed. So "cached" are the indexed blocks as far as the rest of the pool can hold them: exact while nothing
        runs. ``pinned_blocks`` are in use for vLLM, but count as cached here.
        """
        used = max(0, round(num_blocks * self.kv_usage) - pinned_blocks)
        cached = min(held_blocks, num_blocks - used)
        yield "warmpath_num_requests_running", labels, float(self.running)
        yield "warmpath_num_requests_waiting", labels, float(self.waiting)
        for state, blocks in (("used", used), ("cached", cached), ("free", num_blocks - used - cached)):
            yield "warmpath_kv_cache_blocks", (*labels, ("state", state)), float(blocks)


def _overtaken(prefill: LiveRequest) -> bool:
    """Return whether a request of the default order that arrives now starts before ``prefill``."""
    return prefill.request.order > 0 and not prefill.taken_tokens
