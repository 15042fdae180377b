"""What a simulation says of a recorded run is what happened, request by request, where nothing depends on time.

One request at a time, each sent once a router knows what the one before it left; a replica joins in between. Times
and crowds are `benchmarks autoscale --truth`'s.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from cluster.local import LocalCluster, application
from serve_app.replay.cluster import ReplayCluster
from serve_app.replay.simulated import ModelReplay, ReplayPlan
from serve_app.traffic.reader import read_traffic
from tests.integration.conftest import HTTP, PATIENCE_S, alone, eventually, wait_for_replicas, wait_until_cached
from tests.integration.scaling.stage import SETTINGS

pytestmark = [pytest.mark.integration, pytest.mark.long]

CONVERSATIONS, TURNS, SIZE = 6, 5, 16
RECORDED = {**SETTINGS, "kv_pull": True, "simulated_prefill_tokens_per_s": 50_000.0}


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with alone(LocalCluster(1)) as made:
        yield made


def grow_conversations(cluster: LocalCluster, settings: dict[str, object]) -> list[int]:
    """Let conversations of token ids take turns in any order; return the cached tokens. Three begin alike."""
    rng = Random(3)

    def made(count: int) -> list[int]:
        return [rng.randrange(300, 4000) for _ in range(count)]

    systems = [made(400), made(250)]
    histories = [list(systems[number // 3]) for number in range(CONVERSATIONS)]
    order = [number for number in range(CONVERSATIONS) for _ in range(TURNS)]
    rng.shuffle(order)
    found = []
    for place, number in enumerate(order):
        if place == len(order) // 2:
            cluster.deploy(application(settings, {"Replica": {"num_replicas": 3}}), PATIENCE_S)
            wait_for_replicas(cluster.url, 3)
        history = histories[number]
        history += made(rng.randrange(20, 120))
        asked = {
            "model": "demo", "prompt": history, "max_tokens": rng.randrange(1, 60), "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        answer = HTTP.post(f"{cluster.url}/v1/completions", json=asked).raise_for_status().json()
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        history += answer["choices"][0]["token_ids"]
        known = (len(history) - 1) // SIZE * SIZE
        wait_until_cached(cluster.url, {"model": "demo", "prompt": [*history, 1]}, known)
    return found


def test_each_request_hits_what_the_recorded_one_did(cluster: LocalCluster, tmp_path: Path) -> None:
    """Hits of earlier prompts, of earlier answers, and of what a replica that joins has copied."""
    file = tmp_path / "traffic.jsonl"
    settings = {**RECORDED, "replicas": 2, "traffic_log": {"path": str(file)}}
    cluster.deploy(application(settings), PATIENCE_S)
    wait_for_replicas(cluster.url, 2)
    cached = grow_conversations(cluster, settings)
    eventually(lambda: len(read_traffic([file])) == len(cached))
    workload = read_traffic([file])
    assert workload.cached_tokens.tolist() == cached
    replay = ModelReplay(workload, workload.models[0], workload.model == 0, ReplayPlan())
    again = replay.as_recorded()
    assert again is not None and again.replicas == 2 and [count for _, count in again.changes] == [3]
    assert ReplayCluster(replay.traffic, again).run().cached_tokens.tolist() == cached
