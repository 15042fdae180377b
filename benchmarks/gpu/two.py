"""What is measured of two replicas on the card: routing, copies, a flood, predictions, and a death."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, sleep
from typing import Any

import httpx

from benchmarks.common.agent_sessions import random_arrivals, read_sessions, requests_of
from benchmarks.common.report import BenchmarkError, metric_sum, percentile, spread
from benchmarks.common.trace import DEFAULT_TRACE
from benchmarks.common.trace_text import TraceText, trace_shots
from benchmarks.end_to_end import agents
from benchmarks.gpu.clients import TIMEOUT_S, StreamedAnswer, answers, ask, new_client, timed_stream
from benchmarks.gpu.rows import QUESTION_TOKENS, SYSTEM_TOKENS, Bench, MeasuredRow, RowFigures
from benchmarks.gpu.shapes import text_of
from benchmarks.gpu.systems import FLOODER, MODEL, TENANTS, Target, Warmpath
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, read_trace
from serve_app.replay.client import RequestFailed, TimedAnswer, chat_body
from serve_app.replay.open_loop import Shot, fire, hit_rate, summary

POLICIES = ("estimated_ttft", "power_of_two", "round_robin")
FEED_S = 0.1
"""For a replica's news to reach the router."""
FLOODING, KILLED_STREAMS = 64, 16


def routing(bench: Bench, ours: Warmpath) -> Iterator[tuple[str, MeasuredRow]]:
    """Agents' sessions and the chat trace under each policy; yields what is known after each.

    The load is scaled by the measured prefill rate. Sessions arrive within the time that the card needs for their
    uncached tokens, and pause as long; the chat trace's prompts arrive as fast as the card could compute them all.
    """
    rate = bench.prefill_tokens_per_s(ours.target(TENANTS[0]))
    keys = {tenant: ours.keys[tenant] for tenant in TENANTS}
    load, arrivals_s = _sessions(TraceText(bench.checkpoint, bench.shape.agents_per_id), keys, rate)
    text, trace = TraceText(bench.checkpoint, bench.shape.chats_per_id), read_trace(DEFAULT_TRACE, bench.shape.chats)
    needed_s = sum(text.prompt_tokens(request) for request in trace) / rate
    speed = (trace[-1].arrival_s - trace[0].arrival_s) * text.tokens_per_id / TRACE_BLOCK_TOKENS / needed_s
    chats = trace_shots(trace, text, MODEL, speed, keys)
    rows: dict[str, RowFigures] = {"agents": {}, "chats": {}}
    for policy in POLICIES:
        ours.set_policy(policy)
        ours.wait()
        ours.reset()
        once = [1.0] * len(load.sessions)  # so that a job's time is told in seconds
        rows["agents"][policy] = asyncio.run(agents.replay(ours.url, load, arrivals_s, once, policy, flood=False))
        ours.reset()
        rows["chats"][policy] = summary(asyncio.run(fire(ours.url, _exact(chats), TIMEOUT_S, lambda: None)), 1.0)
        for name, row in rows.items():
            yield name, (row, f"{name.capitalize()} through two replicas: {_policies(row)}.")
    ours.set_policy(POLICIES[0])
    ours.wait()


def _sessions(text: TraceText, keys: Mapping[str, str], rate: float) -> tuple[agents.ReplayLoad, list[float]]:
    """Return sessions and their times of arrival; ``rate``: prefilled tokens per second."""
    options = agents.run.parse(["--sessions", "12", "--turns", "6", "--model", MODEL, "--speed", "1"])
    options.longest_pause_s = float("inf")
    chosen = agents.drawn(read_sessions(), options)
    turns = [turn for session in chosen for stream in session.streams for turn in stream.turns]
    new_tokens = sum(turn.prompt_tokens - turn.known_tokens for turn in turns)
    options.longest_pause_s = needed_s = new_tokens * text.tokens_per_id / TRACE_BLOCK_TOKENS / rate
    options.speed = sum(turn.pause_s for turn in turns) / (len(chosen) * needed_s)
    chosen = agents.drawn(read_sessions(), options)
    requests = requests_of(chosen, len(keys))
    shots = _exact(trace_shots(list(requests.values()), text, MODEL, options.speed, keys))
    load = agents.ReplayLoad(chosen, dict(zip(requests, shots, strict=True)), [], [])
    return load, random_arrivals([needed_s] * len(chosen), len(chosen), Random(0))


def _exact(shots: list[Shot]) -> list[Shot]:
    return [replace(shot, body=shot.body | {"ignore_eos": True}) for shot in shots]


def _policies(rows: Mapping[str, RowFigures]) -> str:
    return "; ".join(
        f"{policy} hit rate {row['hit_rate']:.1%}, TTFT {row['ttft_mean_s']:.3f} s on average, p90 "
        f"{row['ttft_p90_s']:.3f} s" + (f", job time {row['job_time_mean']:.2f} s" if "job_time_mean" in row else "")
        for policy, row in rows.items()
    )


def copy(bench: Bench, ours: Warmpath) -> MeasuredRow:
    """A prefix that only the other replica holds: copied, or computed if copying is expected to take longer."""
    ours.set_policy("round_robin")
    ours.wait()
    target, figures = ours.target(TENANTS[0]), RowFigures()
    for tokens in bench.shape.prompts:
        before, pairs = ours.metrics(), list[list[TimedAnswer]]()
        for run in range(bench.shape.runs):
            body = bench.chat(f"copy {run}", 1, bench.text(tokens, f"copy {tokens} {run}"))
            pairs.append([])
            for _ in range(2):  # the second one goes to the other replica
                pairs[-1] += answers(target, [body])
                sleep(FEED_S)
        sleep(1.0)  # reports of counters
        after = ours.metrics()
        counters = {name: f"warmpath_kv_pulls_{name}_total" for name in ("begun", "refused")}
        counters |= {"pulled_tokens": "warmpath_kv_pulled_tokens_total", "pull_s": "warmpath_kv_pull_seconds_sum"}
        figures[str(tokens)] = {
            "cold_ms": spread([1000 * cold.ttft_s for cold, _ in pairs]),
            "elsewhere_ms": spread([1000 * other.ttft_s for _, other in pairs]),
            "copied_tokens": median(other.cached_tokens for _, other in pairs),
            **{name: metric_sum(after, counter) - metric_sum(before, counter) for name, counter in counters.items()},
            "expected_tokens_per_s": metric_sum(after, "warmpath_kv_pull_tokens_per_second") / 2,
        }
    ours.set_policy(POLICIES[0])
    ours.wait()
    said = "; ".join(
        f"{tokens} tokens {row['elsewhere_ms']['p50']:.0f} ms where the other replica has them "
        f"({row['copied_tokens']:.0f} cached; {row['begun']:.0f} copies brought {row['pulled_tokens']:.0f} tokens in "
        f"{row['pull_s']:.2f} s), {row['cold_ms']['p50']:.0f} ms where none has"
        for tokens, row in figures.items()
    )
    return figures, f"First token: {said}."


def flood(bench: Bench, ours: Warmpath) -> MeasuredRow:
    """A tenant's requests with four system prompts, alone and beside another tenant with 64 new prompts at a time."""
    long = bench.shape.prompts[0] // 2
    systems = [bench.text(long // 2, f"polite {number}") for number in range(4)]
    polite = ours.target(TENANTS[0])
    ours.reset()

    async def ask_politely(part: str) -> list[TimedAnswer]:
        bodies = [bench.chat(f"{part} {n}", 8, systems[n % len(systems)]) for n in range(bench.shape.polite)]
        async with new_client() as client:
            return [await ask(client, polite, body) for body in bodies]

    asyncio.run(ask_politely("warm-up"))
    alone = asyncio.run(ask_politely("alone"))
    spawn = get_context("spawn")
    begun = spawn.Event()
    process = spawn.Process(target=_flood, args=(ours.target(FLOODER), bench.checkpoint, long, begun), daemon=True)
    process.start()
    try:
        if not begun.wait(TIMEOUT_S):
            raise BenchmarkError("the flood did not begin")
        beside = asyncio.run(ask_politely("beside"))
    finally:
        process.kill()
        process.join()
    hits = [rate for rate in map(hit_rate, (alone, beside)) if isinstance(rate, float)]
    if len(hits) < 2 or not hits[0]:
        raise BenchmarkError(f"no hit rates alone and beside the flood: {hits}")
    late_s = [percentile([answer.ttft_s for answer in phase], 95) for phase in (alone, beside)]
    ratio, slower = hits[1] / hits[0], late_s[1] / late_s[0]
    figures = {"hit_rates": hits, "ttft_p95_s": late_s, "hit_rate_ratio": ratio, "ttft_p95_ratio": slower}
    return figures, (
        f"Beside a flood a tenant keeps {ratio:.2f} of its hit rate alone ({hits[0]:.1%}); its p95 to a first token is "
        f"{late_s[1]:.3f} s, {slower:.1f} times that alone."
    )  # fmt: skip


def _flood(target: Target, checkpoint: Path, tokens: int, begun: Any) -> None:
    """Send new prompts, 64 at a time, until this process is killed."""

    async def go_on(client: httpx.AsyncClient, stream: int) -> None:
        for number in count():
            body = chat_body(MODEL, 8, text_of(tokens, checkpoint, f"flood {stream} {number}"))
            with suppress(RequestFailed):  # it may be refused
                await ask(client, target, body)
            begun.set()

    async def together() -> None:
        async with new_client() as client:
            await asyncio.gather(*(go_on(client, stream) for stream in range(FLOODING)))

    asyncio.run(together())


def predictions(bench: Bench, ours: Warmpath) -> MeasuredRow:
    """Three tenants' conversations at once: is each answer's number of cached tokens what the router had said?"""
    counts: Counter[str] = Counter()
    each = bench.shape.predictions // len(TENANTS)

    async def talk(client: httpx.AsyncClient, tenant: str) -> None:
        rng, target, messages = Random(tenant), ours.target(tenant), list[dict[str, str]]()
        systems = [bench.text(SYSTEM_TOKENS, f"predict {tenant} {number}") for number in range(4)]
        for number in range(each):
            if not messages or rng.random() < 0.2:
                messages = [{"role": "system", "content": rng.choice(systems)}]
            messages.append({"role": "user", "content": bench.text(QUESTION_TOKENS, f"ask {tenant} {number}")})
            body: dict[str, Any] = {**bench.chat("", 8), "messages": messages}
            predicted = await asyncio.to_thread(ours.predicted_tokens, body, tenant)
            answer = await ask(client, target, body)
            cached = answer.cached_tokens
            counts["exact" if cached == predicted else "more" if cached > predicted else "less"] += 1
            counts["with_a_hit"] += cached > 0
            messages.append({"role": "assistant", "content": answer.text})
            for _ in range(10):  # until the router has heard of this prompt's blocks, if it filled any
                await asyncio.sleep(FEED_S / 2)
                if await asyncio.to_thread(ours.predicted_tokens, body, tenant) > cached:
                    break

    async def talks() -> None:
        async with new_client() as client:
            await asyncio.gather(*(talk(client, tenant) for tenant in TENANTS))

    asyncio.run(talks())
    exact = counts["exact"] / (each * len(TENANTS))
    said = f"{exact:.2%} of {each * len(TENANTS)} requests ({counts['with_a_hit']} with a hit)"
    return {"exact_share": exact, **counts}, f"Cached tokens exactly as predicted: {said}."


def kill(bench: Bench, ours: Warmpath) -> MeasuredRow:
    """A replica is killed while 16 answers stream; the same answers undisturbed, twice, say what equal can mean.

    In 16-bit numbers, an answer's tokens depend a little on what is computed beside it.
    """
    target = ours.target(TENANTS[1])
    bodies = [bench.chat(f"kill {number}", 4 * bench.shape.answer_tokens) for number in range(KILLED_STREAMS)]

    async def stream(kill_after_s: float | None = None) -> list[StreamedAnswer]:
        async with new_client() as client:
            tasks = [asyncio.create_task(timed_stream(client, target, body)) for body in bodies]
            if kill_after_s is not None:
                await asyncio.sleep(kill_after_s)
                await asyncio.to_thread(ours.kill, "Replica")
            return await asyncio.gather(*tasks)

    began_s = perf_counter()
    first = asyncio.run(stream())
    undisturbed_s = perf_counter() - began_s
    again, killed = asyncio.run(stream()), asyncio.run(stream(undisturbed_s / 2))
    figures = {
        "whole": sum(one.tokens == bodies[0]["max_tokens"] for one in killed),
        "equal": sum(one.text == other.text for one, other in zip(killed, first, strict=True)),
        "equal_undisturbed": sum(one.text == other.text for one, other in zip(again, first, strict=True)),
        "pauses_s": sorted(one.pause_s for one in killed),
        "longest_pause_undisturbed_s": max(one.pause_s for one in again),
    }
    return figures, (
        f"A replica killed in {KILLED_STREAMS} streams: {figures['whole']} whole, {figures['equal']} with equal tokens "
        f"(undisturbed: {figures['equal_undisturbed']}), longest pause {figures['pauses_s'][-1]:.2f} s."
    )
