"""The traffic of many tenants during a day, as block ids that no two tenants share.

The published clients give the times, the published trace the conversations, and Zipf's law the popularity of prompts.
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from random import Random

from benchmarks.common.trace import DEFAULT_TRACE
from benchmarks.traffic.arrivals import Client, read_clients, scale_for
from benchmarks.traffic.conversations import Turn, conversations_of
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest, read_trace


@dataclass(frozen=True, slots=True)
class TrafficSettings:
    """Settings. ``requests_per_s``: the mean over all tenants during ``seconds`` from ``start_s`` of the day.

    Each tenant has ``system_prompts`` of 1 to ``system_blocks`` blocks. ``skew``: Zipf's exponent. ``max_blocks``: the
    limit of a conversation's prompt, without the system prompt.
    """

    requests_per_s: float
    seconds: float = 86_400.0
    start_s: float = 0.0
    tenants: int = 16
    system_prompts: int = 12
    system_blocks: int = 8
    skew: float = 1.1
    max_blocks: int = 200
    seed: int = 0


def tenant_traffic(settings: TrafficSettings, trace: Path = DEFAULT_TRACE) -> Iterator[TraceRequest]:
    """Yield the requests in order of arrival, with times in seconds from ``start_s``.

    Raises ValueError if there are too few clients, or no short conversations.
    """
    clients = read_clients()[: settings.tenants]
    if len(clients) < settings.tenants:
        raise ValueError(f"{len(clients)} tenants are known, but {settings.tenants} are needed")
    conversations = conversations_of(read_trace(trace), settings.max_blocks)
    if not conversations:
        raise ValueError(f"no conversation of {trace} begins with at most {settings.max_blocks} blocks")
    scale = scale_for(clients, settings.requests_per_s, settings.start_s, settings.seconds)
    streams = (
        _Tenant(client, _Ids(number, len(clients)), settings, conversations).requests(scale)
        for number, client in enumerate(clients)
    )
    return heapq.merge(*streams, key=attrgetter("arrival_s"))


class _Ids:
    """Makes new block ids for one tenant, which no other tenant gets."""

    def __init__(self, first: int, step: int) -> None:
        self._next, self._step = first, step

    def fresh(self, blocks: int) -> tuple[int, ...]:
        start = self._next
        self._next += blocks * self._step
        return tuple(range(start, self._next, self._step))


@dataclass(slots=True)
class _Open:
    """An open conversation. ``own_ids``: the ids of its latest prompt, without the system prompt."""

    turns: Sequence[Turn]
    asked: int
    system_ids: tuple[int, ...]
    own_ids: tuple[int, ...]


class _Tenant:
    """One client's conversations and system prompts."""

    def __init__(
        self, client: Client, ids: _Ids, settings: TrafficSettings, conversations: Sequence[Sequence[Turn]]
    ) -> None:
        self._client = client
        self._ids = ids
        self._settings = settings
        self._conversations = conversations
        self._rng = Random(f"{settings.seed} {client.name}")
        self._popular_prompts = list(accumulate((r + 1) ** -settings.skew for r in range(settings.system_prompts)))
        sizes = [self._rng.randint(1, settings.system_blocks) for _ in range(settings.system_prompts)]
        self._prompts = [ids.fresh(blocks) for blocks in sizes]

    def requests(self, scale: float) -> Iterator[TraceRequest]:
        """Yield its requests: each continues the conversation that is due longest, or begins a new one."""
        settings = self._settings
        waiting: list[tuple[float, int, _Open]] = []
        asked = 0
        for now_s in self._client.arrivals(self._rng, scale, settings.start_s, settings.seconds):
            if waiting and waiting[0][0] <= now_s:
                _, _, conversation = heapq.heappop(waiting)
            else:
                conversation = self._begin()
            yield self._ask(conversation, now_s)
            if conversation.asked < len(conversation.turns):
                due_s = now_s + conversation.turns[conversation.asked].gap_s
                asked += 1  # breaks ties
                heapq.heappush(waiting, (due_s, asked, conversation))

    def _begin(self) -> _Open:
        popular = self._popular_prompts
        prompt = bisect_left(popular, self._rng.random() * popular[-1])
        return _Open(self._rng.choice(self._conversations), 0, self._prompts[prompt], ())

    def _ask(self, conversation: _Open, now_s: float) -> TraceRequest:
        turn = conversation.turns[conversation.asked]
        conversation.asked += 1
        conversation.own_ids = conversation.own_ids[: turn.kept_blocks] + self._ids.fresh(turn.new_blocks)
        return TraceRequest(
            now_s,
            len(conversation.system_ids) * TRACE_BLOCK_TOKENS + turn.prompt_tokens,
            turn.output_tokens,
            conversation.system_ids + conversation.own_ids,
            self._client.name,
        )
