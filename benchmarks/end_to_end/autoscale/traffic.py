"""The requests of a run: a file's, the tenants' day, or a shape of load, fitted into its seconds. Knows no cluster.

All traffic is read as files of traffic are, and sent as made prompts with exactly their tokens and shared prefixes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.agent_sessions import read_sessions, requests_of
from benchmarks.common.report import BenchmarkError
from benchmarks.traffic.tenants import TrafficSettings, tenant_traffic
from serve_app.checkpoints.reuse import TraceRequest
from serve_app.replay.open_loop import Shot
from serve_app.replay.over_http import PATHS, body_of, shapes_of
from serve_app.replay.text import MadePrompts, tokenizer_at, words_of
from serve_app.traffic.reader import read_traffic
from serve_app.traffic.record import TrafficRequest
from serve_app.traffic.workload import Workload

TENANTS, AGENTS = "tenants", "agents"
DAY_S = 86_400.0
LONGEST_ANSWER, SHORTEST_ANSWER = 96, 4
_TOOTH_S = 28.0
_SMALL = TrafficSettings(0.4, start_s=36_000.0, tenants=4, system_prompts=6, max_blocks=20)
"""Few tenants, so that caches are warm after a minute; a conversation goes on after some 50 requests."""
_DAY = TrafficSettings(0.4, max_blocks=20)


def _ramp(part: float, seconds: float) -> float:
    return 0.15 + 0.85 * (1.0 - abs(2.0 * part - 1.0))


def _burst(part: float, seconds: float) -> float:
    return 1.0 if 0.2 <= part < 0.35 or 0.65 <= part < 0.75 else 0.2


def _plateau(part: float, seconds: float) -> float:
    return 1.0 if 0.2 <= part < 0.7 else 0.2


def _saw(part: float, seconds: float) -> float:
    return 1.0 if part * seconds % _TOOTH_S < _TOOTH_S / 2 else 0.05


SHAPES: dict[str, Callable[[float, float], float]] = {
    "ramp": _ramp,
    "burst": _burst,
    "plateau": _plateau,
    "saw": _saw,
}
"""The offered load, of its peak, at a part of the run and by its seconds."""


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """What is sent. ``trace``: a file, or a name of this module. ``shrink``: what tokens are divided by."""

    trace: str
    seconds: float
    requests_per_s: float
    shrink: int
    seed: int = 0


def load_of(load: OfferedLoad, folder: Path) -> tuple[Workload, float]:
    """Return the requests, and how many times as fast as their own time they are; 1.0 for a shape.

    ``folder``: for a file of what is made here. Raises BenchmarkError and TraceError.
    """
    speed = 1.0
    if load.trace in (TENANTS, AGENTS, *SHAPES):
        path = folder / "made.jsonl"
        path.write_bytes(msgspec.json.Encoder().encode_lines(map(_line, _made(load))))
        speed = DAY_S / load.seconds if load.trace == TENANTS else 1.0
    else:
        path = Path(load.trace)
    workload = read_traffic([path])
    if path.parent != folder:
        workload = first_of(workload, int(load.requests_per_s * load.seconds))
        speed = max(float(workload.arrival_s[-1]) / load.seconds, 1.0)
        workload = replace(workload, arrival_s=workload.arrival_s / speed)
    return shrunk(workload, load.shrink), speed


def first_of(workload: Workload, count: int) -> Workload:
    """Return the first requests."""
    columns: dict[str, Any] = {
        one.name: values[:count]
        for one in fields(workload)
        if isinstance(values := getattr(workload, one.name), np.ndarray) and one.name not in ("paths", "sizes")
    }
    return replace(workload, **{**columns, "path_start": workload.path_start[: count + 1]})


def shrunk(workload: Workload, shrink: int) -> Workload:
    """Return requests with tokens divided by ``shrink``, and answers by half of it. Raises BenchmarkError."""
    if shrink == 1:
        return workload
    if workload.block_tokens % shrink:
        raise BenchmarkError(f"blocks of {workload.block_tokens} tokens cannot be divided by --shrink {shrink}")
    answers = np.rint(workload.output_tokens / max(shrink / 2, 1.0)).astype(np.int32)
    return replace(
        workload,
        block_tokens=workload.block_tokens // shrink,
        prompt_tokens=np.maximum(workload.prompt_tokens // shrink, 1),
        output_tokens=np.clip(answers, SHORTEST_ANSWER, LONGEST_ANSWER),
    )


def shots_of(workload: Workload, model: str, seed: int) -> list[Shot]:
    """Return what is sent: made prompts as token ids, greedy answers of exactly the file's lengths."""
    rows = range(len(workload))
    made = MadePrompts(words_of(tokenizer_at(model)), shapes_of(workload, rows), seed=seed)
    return [
        Shot(
            float(workload.arrival_s[row]), PATHS["completions"], _body(model, made.ids(row), workload, row), number=row
        )
        for row in rows
    ]


def _body(model: str, ids: list[int], workload: Workload, row: int) -> dict[str, object]:
    tokens = max(int(workload.output_tokens[row]), 1)
    return {**body_of(model, ids, tokens, "completions", ("min_tokens", "ignore_eos")), "seed": row}


def _made(load: OfferedLoad) -> Iterator[TraceRequest]:
    if load.trace == TENANTS:
        wanted = replace(_DAY, requests_per_s=load.requests_per_s * load.seconds / DAY_S, seconds=DAY_S, seed=load.seed)
        faster = DAY_S / load.seconds
        return (replace(one, arrival_s=one.arrival_s / faster) for one in tenant_traffic(wanted))
    if load.trace == AGENTS:
        return iter(_agents(load))
    times = list(arrivals(SHAPES[load.trace], load))
    enough = replace(_SMALL, seconds=2.0 * len(times) / _SMALL.requests_per_s, seed=load.seed)
    return (replace(one, arrival_s=at_s) for at_s, one in zip(times, tenant_traffic(enough), strict=False))


def arrivals(shape: Callable[[float, float], float], load: OfferedLoad) -> Iterator[float]:
    """Yield times at random, a Poisson process thinned to a shape's load.

    Source: Lewis and Shedler, Simulation of nonhomogeneous Poisson processes by thinning (1979).
    """
    rng, at_s = Random(load.seed), 0.0
    while (at_s := at_s + rng.expovariate(load.requests_per_s)) < load.seconds:
        if rng.random() < shape(at_s / load.seconds, load.seconds):
            yield at_s


def _agents(load: OfferedLoad, turn_s: float = 4.0, most_tokens: int = 60_000) -> list[TraceRequest]:
    """Return turns of agents' sessions that begin all along; each stream goes on ``turn_s`` and its pause later."""
    sessions, rng = read_sessions(), Random(load.seed)
    requests = requests_of(sessions, tenants=4)
    order = rng.sample(range(len(sessions)), len(sessions))
    found: list[TraceRequest] = []
    wanted = int(load.requests_per_s * load.seconds)
    for number in order:
        begins_s, main = rng.uniform(0.0, load.seconds * 0.8), [0.0]
        for at, stream in enumerate(sessions[number].streams):
            now_s = begins_s if not at else main[min(stream.after + 1, len(main) - 1)]
            for place, turn in enumerate(stream.turns):
                now_s += min(turn.pause_s, turn_s) if place else 0.0
                if now_s < load.seconds and turn.prompt_tokens <= most_tokens:
                    found.append(replace(requests[number, at, place], arrival_s=now_s))
                now_s += turn_s
                if not at:
                    main.append(now_s)
        if len(found) >= wanted:
            break
    return sorted(found, key=lambda request: request.arrival_s)


def _line(request: TraceRequest) -> TrafficRequest:
    return TrafficRequest(
        timestamp=request.arrival_s * 1e3,
        input_length=request.prompt_tokens,
        output_length=request.output_tokens,
        hash_ids=list(request.hash_ids),
        tenant=request.tenant,
    )
