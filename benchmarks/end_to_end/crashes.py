"""Replicas of a real instance are killed by SIGKILL while clients stream: how many answers are lost, cut or altered.

Every question is asked once before the first kill. Later answers to it, with other requests beside them, have the same
tokens, for those depend on the question's seed alone.
"""

import argparse
import asyncio
import random
import re
import time
import uuid
from collections import Counter

import httpx
import psutil

from benchmarks.common.prompts import text_of
from benchmarks.common.report import metric_sum, parser_of, write
from benchmarks.common.server import MARK, instance, marked_processes
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.cli.bench.client import RequestFailed, StreamCut, chat_body, stream_chat

QUESTIONS, SYSTEM_TOKENS, QUESTION_TOKENS = 24, 200, 40


async def run(url: str, mark: str, arguments: argparse.Namespace) -> Counter[str]:
    """Ask and kill until there were so many kills or the time is over; return the counts."""
    rng, counts = random.Random(arguments.seed), Counter[str]()
    model = resolve_model("demo")
    system = text_of(SYSTEM_TOKENS, model, 1)
    questions = [text_of(QUESTION_TOKENS, model, seed) for seed in range(QUESTIONS)]
    bodies = [
        chat_body("demo", rng.randint(20, 120), text, system) | {"temperature": 0.8, "ignore_eos": True, "seed": seed}
        for seed, text in enumerate(questions)
    ]
    ended = asyncio.Event()
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        alone = [(await stream_chat(client, url, body)).text for body in bodies]

        async def ask() -> None:
            while not ended.is_set():
                number = rng.randrange(QUESTIONS)
                try:
                    answer = await stream_chat(client, url, bodies[number])
                except StreamCut:
                    counts["cut"] += 1
                except (RequestFailed, httpx.HTTPError):
                    counts["lost"] += 1
                    await asyncio.sleep(0.2)
                else:
                    counts["answers"] += 1
                    counts["altered"] += answer.text != alone[number]

        async def serving() -> list[psutil.Process]:
            """Return the replicas that live and have told the router of themselves."""
            metrics = (await client.get(f"{url}/metrics")).text
            told = set(re.findall(r'warmpath_replica_info\{[^}]*pid="(\d+)"', metrics))
            return [process for process, _ in marked_processes(mark) if str(process.pid) in told]

        async def kill() -> None:
            end_s = time.monotonic() + 60 * arguments.minutes
            while counts["kills"] < arguments.kills and time.monotonic() < end_s:
                await asyncio.sleep(rng.uniform(0.1, 1.5))
                alive = await serving()
                if len(alive) == arguments.replicas:  # the last one that was killed is replaced
                    rng.choice(alive).kill()
                    counts["kills"] += 1
            ended.set()

        await asyncio.gather(kill(), *(ask() for _ in range(arguments.clients)))
        metrics = (await client.get(f"{url}/metrics")).text
    counts["sent_again"] = int(metric_sum(metrics, "warmpath_request_retries_total"))
    return counts


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--engine", choices=("simulated", "torch"), default="torch")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=10.0, help="at most")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=6, help="streams at once")
    parser.add_argument("--seed", type=int, default=0)
    arguments, mark = parser.parse_args(), uuid.uuid4().hex
    flags = ["--model", "demo", "--engine", arguments.engine, "--replicas", str(arguments.replicas)]
    with instance(*flags, "--set", "dtype=float32", "--set", "num_threads=1", env={MARK: mark}) as url:
        counts = asyncio.run(run(url, mark, arguments))
    said = (
        f"{counts['kills']} SIGKILLs of replicas ({arguments.engine}), {counts['answers']} answers, "
        f"{counts['sent_again']} sent again: {counts['lost']} lost, {counts['cut']} cut, {counts['altered']} altered."
    )
    write(arguments.json, vars(arguments), counts, said)


if __name__ == "__main__":
    main()
