"""Coding agents' sessions over HTTP, closed loop: job times with two settings in turns, or beside a flood.

A job time is a session's time from its first request to its last token, divided by the same without a queue on an
unlimited cache: its pauses, and the times of its answers one at a time with a pool that holds everything. Tokens and
pauses are scaled down. `--against KEY=VALUE` changes the second server; without it the difference shows the noise.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean, median
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from benchmarks.common.agent_sessions import (
    AgentSession,
    AgentStream,
    job_figures,
    job_s,
    random_arrivals,
    read_sessions,
    requests_of,
    working_set_tokens,
)
from benchmarks.common.harness import Findings, Options, benchmark, engine_flag, flag, in_turns, note
from benchmarks.common.report import BenchmarkError, percentile, spread
from benchmarks.common.server import instance
from benchmarks.common.trace_text import TraceText, trace_shots, with_tenants
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest
from serve_app.checkpoints.sources import resolve_model
from serve_app.config.app import AppConfig
from serve_app.replay.client import RequestFailed, TimedAnswer, stream_answer
from serve_app.replay.open_loop import Shot, fire, hit_rate

TIMEOUT_S = 600.0
FLOODER, FLOOD_IDS, FLOOD_FROM = "flooder", 12, 1 << 30
"""A flooding session sends one prompt of ``FLOOD_IDS`` ids from ``FLOOD_FROM`` on, which the trace does not have."""

TurnIndex = tuple[int, int]
"""The numbers of a session's stream and of its turn."""


def drawn(sessions: Sequence[AgentSession], options: Options) -> list[AgentSession]:
    """Return the sessions to replay, with limited turns and scaled pauses. Raises BenchmarkError if too few match."""
    speed, longest_s = float(options.speed), float(options.longest_pause_s)

    def scaled(stream: AgentStream) -> AgentStream:
        turns = [replace(turn, pause_s=min(turn.pause_s / speed, longest_s)) for turn in stream.turns[: options.turns]]
        return replace(stream, turns=tuple(turns), delay_s=min(stream.delay_s / speed, longest_s))

    matching = []
    for session in sessions:
        streams = tuple(scaled(stream) for stream in session.streams if stream.after < options.turns)
        longest = max(turn.prompt_tokens for stream in streams for turn in stream.turns)
        if len(streams[0].turns) == options.turns and longest <= options.longest_prompt:
            matching.append(replace(session, streams=streams))
    if len(matching) < options.sessions:
        raise BenchmarkError(f"{len(matching)} sessions match, but {options.sessions} are needed")
    return Random(options.seed).sample(matching, options.sessions)


async def play(session: AgentSession, ask: Callable[[TurnIndex], Awaitable[object]]) -> float:
    """Send every turn at its time, sub-agents' in parallel with the parent's; return the job's seconds."""
    started_s = time.perf_counter()

    async def stream_of(at: int) -> None:
        children = []
        await asyncio.sleep(session.streams[at].delay_s)
        for number, turn in enumerate(session.streams[at].turns):
            if number:
                await asyncio.sleep(turn.pause_s)
            await ask((at, number))
            if not at:
                begun = [other for other, child in enumerate(session.streams) if child.after == number]
                children += [asyncio.create_task(stream_of(other)) for other in begun]
        await asyncio.gather(*children)

    await stream_of(0)
    return time.perf_counter() - started_s


@dataclass(frozen=True, slots=True)
class ReplayLoad:
    """Sessions, and their requests by session, stream and turn; ``flood``: the flooder's requests."""

    sessions: Sequence[AgentSession]
    shots: dict[tuple[int, int, int], Shot]
    flood: Sequence[Shot]
    flags: Sequence[str]


def make_load(sessions: Sequence[AgentSession], text: TraceText, options: Options) -> ReplayLoad:
    """Return the requests with their tenants' keys, and the flags of a server with these tenants."""
    requests = requests_of(sessions, options.tenants)
    traced = list(requests.values())
    for number in range(options.flood):
        first = FLOOD_FROM + number * FLOOD_IDS
        ids = tuple(range(first, first + FLOOD_IDS))
        traced.append(TraceRequest(0.0, FLOOD_IDS * TRACE_BLOCK_TOKENS, 1, ids, FLOODER))
    shots, flags = with_tenants(trace_shots(traced, text, options.model, options.speed, {}))
    shots = [replace(shot, body=shot.body | {"ignore_eos": True}) for shot in shots]
    flood = [replace(shot, body=shot.body | _lies(number)) for number, shot in enumerate(shots[len(requests) :])]
    return ReplayLoad(sessions, dict(zip(requests, shots, strict=False)), flood, flags)


def _blocks(shot: Shot, size: int) -> int:
    """Return the blocks of ``size`` tokens that hold a request and its longest answer; a word of it is a token."""
    return 1 + (len(shot.body["prompt"].split()) + int(shot.body["max_tokens"])) // size


def pool_blocks(load: ReplayLoad, tokens: float, size: int) -> int:
    """Return the blocks of a pool of ``tokens``, or of the largest request, which a smaller one would refuse."""
    return max(round(tokens / size), *(_blocks(shot, size) for shot in [*load.shots.values(), *load.flood]))


def _lies(number: int) -> dict[str, Any]:
    """Return hints of a flooding session: urgent, long (but it stops early), another one's child, never closed."""
    named = {"session_id": f"flood {number}", "parent_session_id": f"flood {number ^ 1}"}
    hints = {"osl": 1 << 40, "priority": 1 << 30}
    nvext = {"agent_context": named, "agent_hints": hints}
    return {"nvext": nvext, "service_tier": "priority", "max_tokens": 512, "stop": [" ", "e"]}


async def ideal_times(url: str, load: ReplayLoad) -> tuple[list[float], float]:
    """Return each session's seconds without a queue, from answers one after the other, and their hit rate."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        await _answer(client, url, next(iter(load.shots.values())))  # a warm-up
        with Progress(console=Console(stderr=True)) as progress:
            bar = progress.add_task("reference", total=len(load.shots))
            answers = {}
            for key, shot in load.shots.items():
                answers[key] = await _answer(client, url, shot)
                progress.advance(bar)

    def ideal_s(number: int, session: AgentSession) -> float:
        return job_s(session, lambda at, turn: answers[number, at, turn].total_s)

    return [ideal_s(*numbered) for numbered in enumerate(load.sessions)], _hit_rate(list(answers.values()))


async def replay(
    url: str, load: ReplayLoad, arrivals_s: Sequence[float], ideal_s: Sequence[float], name: str, *, flood: bool
) -> dict[str, float]:
    """Start all sessions at their times; return the figures of the run."""
    answers: list[TimedAnswer] = []
    limits = httpx.Limits(max_connections=None)
    began_s = time.perf_counter()
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task(name, total=len(load.shots))
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:

            async def job(number: int) -> float:
                async def ask(place: TurnIndex) -> None:
                    answers.append(await _answer(client, url, load.shots[number, *place]))
                    progress.advance(bar)

                await asyncio.sleep(arrivals_s[number])
                return await play(load.sessions[number], ask) / ideal_s[number]

            jobs = asyncio.gather(*(job(number) for number in range(len(load.sessions))))
            apart_s = arrivals_s[-1] / max(1, len(load.flood))
            shots = [replace(shot, at_s=number * apart_s) for number, shot in enumerate(load.flood)]
            flooded, slowdowns = await asyncio.gather(fire(url, shots if flood else [], TIMEOUT_S, lambda: None), jobs)
    for result in flooded:
        if result.answer is None:
            note(f"a request of the flood failed: {result.status} {result.reason}")
    ttft_s = [answer.ttft_s for answer in answers]
    return {
        **job_figures(slowdowns),
        "hit_rate": _hit_rate(answers),
        "ttft_mean_s": fmean(ttft_s),
        "ttft_p90_s": percentile(ttft_s, 90),
        "flood_answered": sum(result.answer is not None for result in flooded),
        "run_s": time.perf_counter() - began_s,
    }


def _hit_rate(answers: Sequence[TimedAnswer]) -> float:
    rate = hit_rate(answers)
    assert isinstance(rate, float), "warmpath reports cached tokens"
    return rate


async def _answer(client: httpx.AsyncClient, url: str, shot: Shot) -> TimedAnswer:
    headers = {"authorization": f"Bearer {shot.api_key}"} if shot.api_key else {}
    try:
        return await stream_answer(client, url + shot.path, shot.body, headers)
    except (RequestFailed, httpx.HTTPError) as error:  # without all answers a session has no job time
        raise BenchmarkError(f"a turn was not answered: {type(error).__name__}: {error}") from error


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return every figure's median, range and values by row, and the rows' ratios of job time and hit rate.

    ``ratio``: the ratio of the medians; ``pairs``: the ratios of consecutive runs.
    """
    rows = {
        name: {
            figure: spread([run[figure] for run in done]) | {"runs": [run[figure] for run in done]}
            for figure in done[0]
        }
        for name, done in runs.items()
    }
    figures: dict[str, Any] = {"rows": rows}
    for figure in ("job_time_mean", "hit_rate"):
        first, second = ([run[figure] for run in done] for done in runs.values())
        pairs = [one / other for one, other in zip(first, second, strict=True) if other]
        figures[figure] = {"ratio": median(first) / median(second) if median(second) else None, "pairs": pairs}
    return figures


def sentence(compared_rows: dict[str, Any], engine: str) -> str:
    """Return a sentence with both rows' job times and hit rates, and the ratios."""

    def figures(row: dict[str, Any]) -> str:
        job, hits = row["job_time_mean"], row["hit_rate"]
        return f"{job['p50']:.2f} ({job['min']:.2f} to {job['max']:.2f}), hit rate {hits['p50']:.1%}"

    rows = "; ".join(f"{name} {figures(row)}" for name, row in compared_rows["rows"].items())
    job, hits = (compared_rows[figure]["ratio"] for figure in ("job_time_mean", "hit_rate"))
    return (
        f"Job time over that of an unlimited cache without a queue ({engine}; medians of run means, range): {rows}. "
        f"Ratio of the job times {job:.2f}, of the hit rates {'none' if hits is None else format(hits, '.2f')}."
    )


@benchmark(
    __doc__,
    engine_flag("torch", "prefixes"),
    flag("replicas", 1),
    flag("sessions", 20, "random sessions of the trace's 200"),
    flag("turns", 8, "maximum turns of each stream; a session's main stream has this many"),
    flag("longest-prompt", 150_000, "trace tokens; longer sessions are skipped"),
    flag("running", 6.0, "concurrent sessions if there were no queue"),
    flag("tenants", 4),
    flag("tokens-per-id", 4, "replaces the trace's 512: scales all lengths"),
    flag("speed", 32.0, "divides the trace's pauses"),
    flag("longest-pause-s", 5.0, "limit of a pause after that division"),
    flag("pool", 0.5, "fraction of the concurrent sessions' contexts"),
    flag("runs", 5, "runs of each of the two servers"),
    flag("seed", 0),
    flag("set", [], "settings of both servers", action="append", metavar="KEY=VALUE"),
    flag("against", [], "only of the second server", action="append", metavar="KEY=VALUE"),
    flag("flood", 0, "sessions that another tenant opens, with lies in all hints"),
    model="smollm2",
)
def run(options: Options) -> Findings:
    """Measure the reference, then both rows in alternation."""
    size = AppConfig(engine=options.engine).block_size
    text = TraceText(resolve_model(options.model), options.tokens_per_id)
    load = make_load(drawn(read_sessions(), options), text, options)
    common = ["--model", options.model, "--engine", options.engine, "--replicas", str(options.replicas), *load.flags]
    common += ["--max-connections-per-address", "4096", f"--set=block_size={size}", "--set=enforce_eager=true"]
    common += ["--set=pin_budget=0", *(f"--set={pair}" for pair in options.set)]  # all of a pool is for requests

    with instance(*common, f"--set=num_blocks={sum(_blocks(shot, size) for shot in load.shots.values())}") as url:
        ideal_s, ideal_hit_rate = asyncio.run(ideal_times(url, load))
    arrivals_s = random_arrivals(ideal_s, options.running, Random(options.seed))
    working_set = working_set_tokens(load.sessions, ideal_s, options.running) * text.tokens_per_id / TRACE_BLOCK_TOKENS
    blocks = pool_blocks(load, options.pool * working_set / options.replicas, size)
    note(f"a pool of {blocks} blocks; each of {2 * options.runs} runs takes {arrivals_s[-1]:.0f} s and more")
    if options.flood:
        rows: dict[str, tuple[list[str], bool]] = {"beside the flood": ([], True), "alone": ([], False)}
    else:
        rows = {"as set": ([], False), f"against {', '.join(options.against) or 'the same'}": (options.against, False)}

    def turn(name: str, number: int) -> dict[str, float]:
        added, flood = rows[name]
        with instance(*common, f"--set=num_blocks={blocks}", *(f"--set={pair}" for pair in added)) as url:
            return asyncio.run(replay(url, load, arrivals_s, ideal_s, f"{name}, run {number + 1}", flood=flood))

    results = compared(in_turns(rows, options.runs, turn, alternate=True))
    results["reference"] = {
        "job_s": ideal_s, "hit_rate": ideal_hit_rate, "working_set_tokens": working_set, "num_blocks": blocks,
    }  # fmt: skip
    return Findings(results, sentence(results, options.engine))
