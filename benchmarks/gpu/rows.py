"""What is measured, row by row: each returns its figures and a sentence."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.common.agent_sessions import random_arrivals, read_sessions, requests_of
from benchmarks.common.open_loop import Result, Shot, fire, summary
from benchmarks.common.report import BenchmarkError, metric_sum, spread
from benchmarks.common.trace import DEFAULT_TRACE
from benchmarks.end_to_end.front_door import cpu_s
from benchmarks.end_to_end.replay import agents
from benchmarks.end_to_end.replay.shots import trace_shots
from benchmarks.end_to_end.replay.text import TraceText
from benchmarks.gpu.clients import CHAT, TIMEOUT_S, Body, Clients, Stream, Target, answers, new_client, timed_stream
from benchmarks.gpu.shapes import Shape, text_of
from benchmarks.gpu.systems import FLOODER, MODEL, OPERATOR, TENANTS, Warmpath
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, read_trace
from serve_app.cli.bench.client import Answer, chat_body

Figures = dict[str, Any]
POLICIES = ("estimated_ttft", "power_of_two", "round_robin")
FEED_S = 0.1
"""For a replica's news to reach the router."""
SYSTEM_TOKENS, QUESTION_TOKENS = 512, 32


@dataclass(frozen=True)
class Bench:
    """What every row needs."""

    shape: Shape
    checkpoint: Path
    clients: Clients

    def chat(self, seed: object, max_tokens: int, system: str | None = None, tokens: int = QUESTION_TOKENS) -> Body:
        """Return a chat with a question that no other seed has; its answer has exactly ``max_tokens``."""
        body = chat_body(MODEL, max_tokens, text_of(tokens, self.checkpoint, seed), system)
        return body | {"ignore_eos": True}

    def text(self, tokens: int, seed: object) -> str:
        """Return a text of so many tokens."""
        return text_of(tokens, self.checkpoint, seed)


def first_tokens(bench: Bench, targets: Mapping[str, Target]) -> tuple[Figures, str]:
    """TTFT of long prompts, new and with all but the question cached, one at a time, the systems in turn."""
    found: Figures = {}
    for tokens in bench.shape.prompts:
        times: dict[str, dict[str, list[float]]] = {name: {"cold_ms": [], "warm_ms": []} for name in targets}
        for run in range(-1, bench.shape.runs):  # the first one warms up
            system = bench.text(tokens, f"first {tokens} {run}")
            for name, target in targets.items():
                for kind in ("cold_ms", "warm_ms"):
                    answer = answers(target, [bench.chat(f"{kind} {run}", 1, system)])[0]
                    cached = answer.cached_tokens >= tokens // 2
                    if cached != (kind == "warm_ms"):
                        raise BenchmarkError(f"{name}: {answer.cached_tokens} cached tokens of a prompt {kind[:4]}")
                    if run >= 0:
                        times[name][kind].append(1000 * answer.ttft_s)
        found[str(tokens)] = {
            name: {kind: spread(values) for kind, values in kinds.items()} for name, kinds in times.items()
        }
    longest = str(bench.shape.prompts[-1])
    said = "; ".join(
        f"{name} {row['cold_ms']['p50']:.0f} ms new, {row['warm_ms']['p50']:.0f} ms cached"
        for name, row in found[longest].items()
    )
    return found, f"First token of {longest} tokens: {said}."


def decoding(bench: Bench, targets: Mapping[str, Target]) -> tuple[Figures, str]:
    """Tokens per second of concurrent streams, and the CPU time of each kind of process for a token; in turn."""
    tokens = bench.shape.answer_tokens
    runs: dict[str, dict[str, list[Figures]]] = {str(n): {name: [] for name in targets} for n in bench.shape.streams}
    for streams in bench.shape.streams:
        for run in range(-1, bench.shape.runs):
            for name, target in targets.items():
                bodies = [bench.chat(f"decode {streams} {run} {number}", tokens) for number in range(streams)]
                before = cpu_s(target.mark)
                done = bench.clients.answers(target, bodies)
                used = cpu_s(target.mark) - before
                made = sum(answer.completion_tokens for answer in done)
                if run >= 0:
                    rate = made / max(answer.total_s for answer in done)
                    cpu = {kind: 1e6 * seconds / made for kind, seconds in sorted(used.items())}
                    runs[str(streams)][name].append({"tokens_per_s": rate, "cpu_us_a_token": cpu})
    found = {
        streams: {
            name: {
                "tokens_per_s": spread([run["tokens_per_s"] for run in done]),
                "cpu_us_a_token": _medians([run["cpu_us_a_token"] for run in done]),
            }
            for name, done in systems.items()
        }
        for streams, systems in runs.items()
    }
    rows = "; ".join(
        f"{streams} streams " + ", ".join(f"{name} {row['tokens_per_s']['p50']:,.0f}" for name, row in systems.items())
        for streams, systems in found.items()
    )
    return found, f"Tokens per second (prompts of {QUESTION_TOKENS} tokens, answers of {tokens}): {rows}."


def requests(bench: Bench, targets: Mapping[str, Target]) -> tuple[Figures, str]:
    """CPU time and TTFT of short requests with a cached system prompt, one at a time."""
    found: Figures = {}
    system, count = bench.text(SYSTEM_TOKENS, "requests"), 20 * bench.shape.runs
    for name, target in targets.items():
        bodies = [bench.chat(f"request {number}", 1, system) for number in range(count)]
        answers(target, bodies[:1])
        before = cpu_s(target.mark)
        done = [answers(target, [body])[0] for body in bodies]
        used = cpu_s(target.mark) - before
        cpu = {kind: 1e3 * seconds / count for kind, seconds in sorted(used.items())}
        found[name] = {"ttft_ms": spread([1000 * answer.ttft_s for answer in done]), "cpu_ms_a_request": cpu}
    rows = "; ".join(
        f"{name} {row['ttft_ms']['p50']:.1f} ms, {sum(row['cpu_ms_a_request'].values()):.1f} ms of CPU time"
        for name, row in found.items()
    )
    return found, f"A short request with a cached system prompt: {rows}."


def routing(bench: Bench, ours: Warmpath, prefill_tokens_per_s: float) -> Iterator[tuple[str, Figures, str]]:
    """Agents' sessions and the chat trace through two replicas, under each policy; yields a row for each trace.

    The load is scaled by the measured prefill rate. Sessions arrive within the time that the card needs for their
    uncached tokens, and pause as long; the chat trace's prompts arrive as fast as the card could compute them all.
    """
    keys = {tenant: ours.keys[tenant] for tenant in TENANTS}
    text = TraceText(bench.checkpoint, bench.shape.agents_per_id)
    load, arrivals_s = _sessions(text, keys, prefill_tokens_per_s)
    text = TraceText(bench.checkpoint, bench.shape.chats_per_id)
    trace, shrink = read_trace(DEFAULT_TRACE, bench.shape.chats), TRACE_BLOCK_TOKENS / text.tokens_per_id
    needed_s = sum(text.prompt_tokens(request) for request in trace) / prefill_tokens_per_s
    speed = (trace[-1].arrival_s - trace[0].arrival_s) / shrink / needed_s
    options = agents.parse(["--model", MODEL, "--speed", str(speed)])
    chats = [_exact(shot) for shot in trace_shots(trace, text, options, keys)]
    rows: dict[str, Figures] = {"agents": {}, "chats": {}}
    for policy in POLICIES:
        ours.change(policy=policy)
        ours.reset()
        rows["agents"][policy] = asyncio.run(
            agents.replay(ours.url, load, arrivals_s, [1.0] * len(load.sessions), policy, flood=False)
        )
        ours.reset()
        found = summary(asyncio.run(fire(ours.url, chats, TIMEOUT_S, lambda: None)), ttft_slo_s=1.0)
        rows["chats"][policy] = found | {"ttft_p90_s": found["ttft_p90_s"]}
        for name, row in rows.items():
            yield name, row, f"{name.capitalize()} through two replicas: {_policies(row)}."
    ours.change(policy=POLICIES[0])


def prefill_rate(bench: Bench, target: Target) -> float:
    """Return the prompt tokens that the card computes in a second, from a few new prompts."""
    tokens = bench.shape.prompts[0]
    bodies = [bench.chat(f"rate {number}", 1, tokens=tokens) for number in range(4)]
    return tokens / median(answers(target, [body])[0].ttft_s for body in bodies)


def _policies(rows: Mapping[str, Figures]) -> str:
    return "; ".join(
        f"{policy} hit rate {row['hit_rate']:.1%}, TTFT {row['ttft_mean_s']:.3f} s on average, p90 "
        f"{row['ttft_p90_s']:.3f} s" + (f", job time {row['job_time_mean']:.2f} s" if "job_time_mean" in row else "")
        for policy, row in rows.items()
    )


def _exact(shot: Shot) -> Shot:
    return Shot(shot.at_s, shot.path, shot.body | {"ignore_eos": True}, shot.tenant, shot.api_key)


def _sessions(text: TraceText, keys: Mapping[str, str], rate: float) -> tuple[agents.Load, list[float]]:
    """Return sessions and their times of arrival; ``rate``: prefilled tokens per second."""
    options = agents.parse(["--sessions", "12", "--turns", "6", "--model", MODEL, "--speed", "1"])
    options.longest_pause_s = float("inf")
    chosen = agents.drawn(read_sessions(), options)
    turns = [turn for session in chosen for stream in session.streams for turn in stream.turns]
    needed_s = (
        sum(turn.prompt_tokens - turn.known_tokens for turn in turns) * text.tokens_per_id / TRACE_BLOCK_TOKENS / rate
    )
    options.speed = sum(turn.pause_s for turn in turns) / (len(chosen) * needed_s)
    options.longest_pause_s = needed_s
    chosen = agents.drawn(read_sessions(), options)
    requests_by_turn = requests_of(chosen, len(keys))
    shots = map(_exact, trace_shots(list(requests_by_turn.values()), text, options, dict(keys)))
    load = agents.Load(chosen, dict(zip(requests_by_turn, shots, strict=True)), [], [])
    return load, random_arrivals([needed_s] * len(chosen), len(chosen), Random(0))


def copying(bench: Bench, ours: Warmpath) -> tuple[Figures, str]:
    """A prefix that only the other replica holds: copied, or computed if copying is expected to take longer."""
    ours.change(policy="round_robin")
    target = Target(ours.url, ours.bearer(TENANTS[0]), ours.mark)
    found: Figures = {}
    for tokens in bench.shape.prompts:
        before = ours.http.get(f"{ours.url}/metrics").text
        elsewhere = []
        for run in range(bench.shape.runs):
            body = bench.chat(f"copy {run}", 1, bench.text(tokens, f"copy {tokens} {run}"))
            cold, other = _twice(target, body)
            elsewhere.append({"cold_ms": 1000 * cold.ttft_s, "elsewhere_ms": 1000 * other.ttft_s,
                              "copied_tokens": other.cached_tokens})  # fmt: skip
        time.sleep(1.0)  # reports of counters
        after = ours.http.get(f"{ours.url}/metrics").text
        names = ("begun", "refused", "joined")
        found[str(tokens)] = {
            "cold_ms": spread([one["cold_ms"] for one in elsewhere]),
            "elsewhere_ms": spread([one["elsewhere_ms"] for one in elsewhere]),
            "copied_tokens": [one["copied_tokens"] for one in elsewhere],
            **{name: _grown(before, after, f"warmpath_kv_pulls_{name}_total") for name in names},
            "tokens_per_s": metric_sum(after, "warmpath_kv_pull_tokens_per_second"),
        }
    moves = [move for move in ours.snapshot().get("moves", ()) if move["kind"] == "prewarm" and move.get("seconds")]
    found["joined_replica_copied"] = moves
    rate = max((move["bytes"] / move["seconds"] for move in moves), default=0.0)
    ours.change(policy=POLICIES[0])
    said = "; ".join(
        f"{tokens} tokens {row['elsewhere_ms']['p50']:.0f} ms where the other replica has them "
        f"({median(row['copied_tokens']):.0f} copied), {row['cold_ms']['p50']:.0f} ms where none has"
        for tokens, row in found.items() if tokens.isdigit()
    )  # fmt: skip
    return found, f"First token: {said}. A joining replica copied {rate / 1e9:.2f} GB/s."


def _twice(target: Target, body: Body) -> tuple[Answer, Answer]:
    first = answers(target, [body])[0]
    time.sleep(FEED_S)
    return first, answers(target, [body])[0]


def _grown(before: str, after: str, name: str) -> float:
    return metric_sum(after, name) - metric_sum(before, name)


def flood(bench: Bench, ours: Warmpath, prefill_tokens_per_s: float) -> tuple[Figures, str]:
    """A tenant with four system prompts, alone and beside another one that sends twice what the card can compute."""
    seconds, long = bench.shape.seconds, bench.shape.prompts[0] // 2
    systems = [bench.text(bench.shape.prompts[0] // 4, f"polite {number}") for number in range(4)]

    def shots(tenant: str, apart_s: float, body: Any) -> list[Shot]:
        times = [number * apart_s for number in range(max(1, int(seconds / apart_s)))]
        return [Shot(at_s, CHAT, body(number), tenant, ours.keys[tenant]) for number, at_s in enumerate(times)]

    def polite(part: str) -> list[Shot]:
        return shots(TENANTS[0], 0.2, lambda n: bench.chat(f"{part} {n}", 8, systems[n % len(systems)]))

    flooding = shots(FLOODER, long / (2 * prefill_tokens_per_s), lambda n: bench.chat(f"flood {n}", 8, tokens=long))
    ours.reset()
    asyncio.run(fire(ours.url, polite("warm-up")[: 2 * len(systems)], TIMEOUT_S, lambda: None))
    alone = asyncio.run(fire(ours.url, polite("alone"), TIMEOUT_S, lambda: None))

    async def both() -> tuple[list[Result], list[Result]]:
        # The flood is there first, and goes on until the polite tenant's last request.
        late = [Shot(shot.at_s + 1.0, *_rest(shot)) for shot in polite("beside")]
        flooded = [Shot(shot.at_s * (seconds + 1) / seconds, *_rest(shot)) for shot in flooding]
        both = await asyncio.gather(
            fire(ours.url, late, TIMEOUT_S, lambda: None), fire(ours.url, flooded, TIMEOUT_S, lambda: None)
        )
        return both[0], both[1]

    beside, flooded = asyncio.run(both())
    rows = {name: _side(found) for name, found in (("alone", alone), ("beside", beside), ("flooder", flooded))}
    hits = rows["beside"]["hit_rate"] / rows["alone"]["hit_rate"]
    slower = rows["beside"]["ttft_p95_s"] / rows["alone"]["ttft_p95_s"]
    said = (
        f"Beside a flood a tenant keeps {hits:.2f} of its hit rate alone ({rows['alone']['hit_rate']:.1%}); its p95 to "
        f"a first token is {rows['beside']['ttft_p95_s']:.3f} s, {slower:.1f} times that alone."
    )
    return rows | {"hit_rate_ratio": hits, "ttft_p95_ratio": slower}, said


def _rest(shot: Shot) -> tuple[str, Body, str, str]:
    return shot.path, shot.body, shot.tenant, shot.api_key


def _side(results: list[Result]) -> Figures:
    figures = summary(results, ttft_slo_s=1.0)
    ttft = sorted(result.ttft_s for result in results if result.answer is not None)
    if not ttft:
        raise BenchmarkError(f"nothing was answered: {figures['reasons']}")
    return figures | {"ttft_p95_s": ttft[int(0.95 * (len(ttft) - 1))]}


def killing(bench: Bench, ours: Warmpath) -> tuple[Figures, str]:
    """A replica is killed while 16 answers stream; the same answers undisturbed, twice, say what equal can mean.

    In 16-bit numbers, an answer's tokens depend a little on what is computed beside it.
    """
    target = Target(ours.url, ours.bearer(TENANTS[1]), ours.mark)
    bodies = [bench.chat(f"kill {number}", 4 * bench.shape.answer_tokens) for number in range(16)]

    async def stream(*, kill: bool) -> list[Stream]:
        async with new_client() as client:
            tasks = [asyncio.create_task(timed_stream(client, target, body)) for body in bodies]
            if kill:
                await asyncio.sleep(0.5 * undisturbed_s)
                await asyncio.to_thread(ours.cluster.kill, "Replica")
            return await asyncio.gather(*tasks)

    undisturbed_s = 0.0
    began_s = time.perf_counter()
    first = asyncio.run(stream(kill=False))
    undisturbed_s = time.perf_counter() - began_s
    again, killed = asyncio.run(stream(kill=False)), asyncio.run(stream(kill=True))
    whole = sum(one.tokens == bodies[0]["max_tokens"] for one in killed)
    figures = {
        "streams": len(killed),
        "whole": whole,
        "equal": sum(one.text == other.text for one, other in zip(killed, first, strict=True)),
        "equal_undisturbed": sum(one.text == other.text for one, other in zip(again, first, strict=True)),
        "longest_pause_s": max(one.pause_s for one in killed),
        "pauses_s": sorted(one.pause_s for one in killed),
        "longest_pause_undisturbed_s": max(one.pause_s for one in again),
    }
    said = (
        f"A replica killed in {len(killed)} streams: {whole} whole, {figures['equal']} with equal tokens (undisturbed: "
        f"{figures['equal_undisturbed']}), longest pause {figures['longest_pause_s']:.2f} s."
    )
    return figures, said


def predicting(bench: Bench, ours: Warmpath) -> tuple[Figures, str]:
    """Three tenants' conversations at once: is each answer's number of cached tokens what the router had said?"""
    counts: Counter[str] = Counter()
    each = bench.shape.predictions // len(TENANTS)

    async def talk(client: Any, tenant: str) -> None:
        rng, target = Random(tenant), Target(ours.url, ours.bearer(tenant), ours.mark)
        systems = [bench.text(SYSTEM_TOKENS, f"predict {tenant} {number}") for number in range(4)]
        messages: list[dict[str, str]] = []
        for number in range(each):
            if not messages or rng.random() < 0.2:
                messages = [{"role": "system", "content": rng.choice(systems)}]
            messages.append({"role": "user", "content": bench.text(QUESTION_TOKENS, f"ask {tenant} {number}")})
            body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            asked = await client.post(
                f"{ours.url}/v1/cache/explain", json={**body, "tenant": tenant}, headers=ours.bearer(OPERATOR)
            )
            predicted = _predicted(asked.raise_for_status().json())
            answered = await client.post(target.url + CHAT, json=body, headers=target.headers)
            answer = answered.raise_for_status().json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            counts["exact" if cached == predicted else "more" if cached > predicted else "less"] += 1
            counts["with a hit"] += cached > 0
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            await asyncio.sleep(FEED_S / 2)

    async def talks() -> None:
        async with new_client() as client:
            await asyncio.gather(*(talk(client, tenant) for tenant in TENANTS))

    asyncio.run(talks())
    total = each * len(TENANTS)
    exact = counts["exact"] / total
    said = f"Cached tokens exactly as predicted: {exact:.2%} of {total} requests ({counts['with a hit']} with a hit)."
    return {"requests": total, "exact": exact, **counts}, said


def _predicted(explanation: dict[str, Any]) -> int:
    (prompt,) = explanation["prompts"]
    chosen = prompt["winners"][explanation["policy"]]["replica_id"]
    return next(
        max(int(one["cached_tokens"]), int(one["pull_tokens"]))
        for one in prompt["replicas"]
        if one["replica_id"] == chosen
    )


def _medians(rows: list[Mapping[str, float]]) -> dict[str, float]:
    return {kind: median(row.get(kind, 0.0) for row in rows) for kind in sorted({kind for row in rows for kind in row})}
