"""Sessions of coding agents from a published trace: consecutive turns, with sub-agents in parallel."""

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from math import inf
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.common.report import percentile
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest

AGENT_TRACE = Path(__file__).parents[1] / "traces" / "agent_sessions.jsonl.gz"
"""200 sessions (``benchmarks/traces/README.md``)."""

AWAKE_S = 300.0
"""A session does not count as running during a longer pause."""


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One request. ``pause_s``: since the previous answer of its stream; ``hash_ids``: as in ``TraceRequest``.

    ``known_tokens``: the prompt's first tokens that an unlimited cache has from the stream's earlier turns.
    """

    prompt_tokens: int
    output_tokens: int
    pause_s: float
    hash_ids: tuple[int, ...]
    known_tokens: int


@dataclass(frozen=True, slots=True)
class AgentStream:
    """Consecutive turns. ``after``: the parent's turn; this stream begins ``delay_s`` after that turn's end."""

    turns: tuple[AgentTurn, ...]
    after: int = -1
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AgentSession:
    """A main stream, and its sub-agents' streams. ``opening_tokens``: tools and system prompt of the main stream."""

    streams: tuple[AgentStream, ...]
    opening_tokens: int


@dataclass(slots=True)
class _Ids:
    """Assigns block ids. Openings of equal sizes count as equal texts, which is a guess."""

    fresh: Iterator[int] = field(default_factory=count)
    openings: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def opening(self, tools: int, system: int) -> list[int]:
        key = tools, system
        if key not in self.openings:
            first = self.openings.get((tools, 0), [])
            blocks = (tools + system) // TRACE_BLOCK_TOKENS
            self.openings[key] = first[:blocks] + [next(self.fresh) for _ in range(max(0, blocks - len(first)))]
        return self.openings[key]


def read_sessions(path: Path = AGENT_TRACE) -> list[AgentSession]:
    """Read a gzipped trace. Raises OSError, and KeyError or ValueError for another format."""
    ids = _Ids()
    with gzip.open(path, "rt") as lines:
        return [_session(json.loads(line), ids) for line in lines]


def job_s(session: AgentSession, answer_s: Callable[[int, int], float], longest_pause_s: float = inf) -> float:
    """Return the seconds from a session's first request to its last token; ``answer_s``: by stream and turn."""
    ends: list[float] = []
    last_s = 0.0
    for at, stream in enumerate(session.streams):
        now_s = min(stream.delay_s, longest_pause_s) + (ends[stream.after] if at else 0.0)
        for number, turn in enumerate(stream.turns):
            now_s += (min(turn.pause_s, longest_pause_s) if number else 0.0) + answer_s(at, number)
            if not at:
                ends.append(now_s)
        last_s = max(last_s, now_s)
    return last_s


def job_figures(slowdowns: Sequence[float]) -> dict[str, float]:
    """Return the figures of job times, each divided by the session's ideal one."""
    return {
        "job_time_mean": fmean(slowdowns),
        "job_time_p50": percentile(slowdowns, 50),
        "job_time_p90": percentile(slowdowns, 90),
    }


def random_arrivals(ideal_s: Sequence[float], running: float, rng: Random) -> list[float]:
    """Return arrival times at which about ``running`` sessions of ``ideal_s`` would run concurrently."""
    return list(accumulate(rng.expovariate(running / fmean(ideal_s)) for _ in ideal_s))


def working_set_tokens(sessions: Sequence[AgentSession], ideal_s: Sequence[float], running: float) -> float:
    """Return the mean size of the concurrent sessions' contexts: the longest prompt of each main stream."""
    longest = [max(turn.prompt_tokens for turn in session.streams[0].turns) for session in sessions]
    return running * sum(tokens * seconds for tokens, seconds in zip(longest, ideal_s, strict=True)) / sum(ideal_s)


def _session(row: dict[str, Any], ids: _Ids) -> AgentSession:
    size, tools, system = int(row["block_tokens"]), int(row["tool_tokens"] or 0), int(row["system_tokens"] or 0)
    ids.opening(tools, 0)
    main = [turn for turn in row["turns"] if "in" in turn]
    streams = [AgentStream(_turns(main, size, ids.opening(tools, system), ids))]
    before = -1
    for turn in row["turns"]:
        if "in" in turn:
            before += 1
            continue
        agent = turn["agent"]
        opening = ids.opening(int(agent["tool_tokens"] or 0), int(agent["system_tokens"] or 0))
        parent = main[max(before, 0)]
        delay_s = max(0.0, turn["t"] - parent["t"] - (parent["api"] or 0.0))
        if agent["turns"]:
            streams.append(AgentStream(_turns(agent["turns"], size, opening, ids), max(before, 0), delay_s))
    return AgentSession(tuple(streams), (tools + system) // TRACE_BLOCK_TOKENS * TRACE_BLOCK_TOKENS)


def _turns(rows: list[dict[str, Any]], size: int, opening: list[int], ids: _Ids) -> tuple[AgentTurn, ...]:
    made: list[AgentTurn] = []
    for row in rows:
        tokens = max(1, int(row["in"]))
        blocks = -(-tokens // TRACE_BLOCK_TOKENS)
        if row["from"] is None:
            beginning: list[int] = opening[: (tokens - 1) // TRACE_BLOCK_TOKENS]
            cached = 0
        else:
            source = made[row["from"]]
            shared = min(int(row["shared"]) * size, tokens - 1, source.prompt_tokens) // TRACE_BLOCK_TOKENS
            beginning, cached = list(source.hash_ids[:shared]), shared * TRACE_BLOCK_TOKENS
        fresh = [next(ids.fresh) for _ in range(blocks - len(beginning))]
        pause_s, out = float(row["think"] or 0.0), int(row["out"] or 1)
        made.append(AgentTurn(tokens, out, pause_s, (*beginning, *fresh), cached))
    return tuple(made)


def requests_of(sessions: Sequence[AgentSession], tenants: int) -> dict[tuple[int, int, int], TraceRequest]:
    """Return the requests by session, stream and turn; sessions are assigned to tenants in turn."""
    return {
        (number, at, place): TraceRequest(
            0.0, turn.prompt_tokens, turn.output_tokens, turn.hash_ids, f"tenant-{number % tenants}"
        )
        for number, session in enumerate(sessions)
        for at, stream in enumerate(session.streams)
        for place, turn in enumerate(stream.turns)
    }
