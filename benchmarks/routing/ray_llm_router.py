"""CPU time that our router takes of Ray's ingress for a request: rendering, tokens, hashes, the decision.

Requests of several sizes, each with a system prompt that came before and a question that is new, among 64 replicas that
hold a million blocks. The router is the class that Ray loads, asked as Serve asks it.
"""

import asyncio
import random
import statistics
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve.request_router import ReplicaID, RunningReplica

from benchmarks.common.prompts import text_of
from benchmarks.common.report import parser_of, progress, write
from benchmarks.routing.decision_latency import reports
from benchmarks.routing.workload import RoutingWorkload, messages_of
from router.protocol.events import BlocksStored
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.ray_llm.router import WarmRouter
from serve_app.ray_llm.scopes import METADATA, EngineFacts, Scopes

REPLICAS, BLOCKS, BLOCK = 64, 1_000_000, 16
HEADER = "authorization"


def main() -> None:
    """Measure each size in turn, as often as there are runs."""
    parser = parser_of(__doc__, "demo")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    rows = asyncio.run(_measure_all(arguments))
    said = "; ".join(
        f"{tokens} tokens: {statistics.median(times):.2f} ms ({min(times):.2f} to {max(times):.2f})"
        for tokens, times in rows.items()
    )
    write(arguments.json, vars(arguments), rows, f"CPU time of a request in the router, medians of runs. {said}.")


async def _measure_all(arguments: Any) -> dict[int, list[float]]:
    source = resolve_model(arguments.model)
    router = _router(str(source))
    workload = RoutingWorkload(REPLICAS, BLOCKS)
    for chain, holders in progress(list(workload.prompts()), "a million blocks"):
        for name in holders:
            router.core.apply(name, [BlocksStored(piece) for piece in messages_of(chain)])
    for name, report in reports(workload):
        router.core.apply(name, (report,))
    rows: dict[int, list[float]] = {tokens: [] for tokens in arguments.prompt_tokens}
    for run in range(arguments.runs):
        for tokens, times in rows.items():
            systems = [text_of(tokens, source, seed) for seed in range(3)]
            await _ask(router, systems, 10, f"warm {run}")
            began_s = time.process_time()
            await _ask(router, systems, arguments.requests, f"run {run}")
            times.append(1000 * (time.process_time() - began_s) / arguments.requests)
    return rows


def _router(source: str) -> WarmRouter:
    deployment = DeploymentID("LLMServer", "benchmark")
    router = WarmRouter(deployment, DeploymentHandleSource.REPLICA)
    router.initialize_state()
    facts = EngineFacts("demo", source, BLOCK, HEADER, Scopes("demo", HEADER).check)
    replicas = [
        SimpleNamespace(
            replica_id=ReplicaID(name, deployment),
            replica_metadata={METADATA: asdict(facts)},
            max_ongoing_requests=1000,
            node_id="",
            availability_zone="",
            multiplexed_model_ids=(),
        )
        for name in RoutingWorkload(REPLICAS, BLOCKS).names()
    ]
    router.update_replicas(cast("list[RunningReplica]", replicas))
    return router


async def _ask(router: WarmRouter, systems: list[str], requests: int, name: str) -> None:
    draw = random.Random(name)
    for number in range(requests):
        messages = [
            {"role": "system", "content": draw.choice(systems)},
            {"role": "user", "content": f"{name}, question {number}: what does clause {draw.randrange(1000)} say?"},
        ]
        asked = SimpleNamespace(
            args=[SimpleNamespace(model="demo", messages=messages), SimpleNamespace(headers={HEADER: "Bearer a"})],
            kwargs={},
            metadata=SimpleNamespace(request_id=f"{name} {number}", session_id=""),
        )
        await router._choose_replica_for_request(cast("Any", asked))


if __name__ == "__main__":
    main()
