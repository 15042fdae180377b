"""A joining replica of vLLM copies its peer's blocks, and a leaving one hands over those only it holds: over HTTP."""

from collections.abc import Iterator

import pytest

from cluster.local import LocalCluster, application
from tests.integration.conftest import eventually, replicas_of, wait_for_replicas, wait_until_cached
from tests.integration.scaling.stage import SYSTEM_TOKENS, ask, ask_at_once, body, notices, texts, wait_left

START_S = 500
BLOCK = 32
SETTINGS = {
    "model": "demo",
    "engine": "vllm",
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_bytes": 2**27,
    "max_model_len": 2048,
    "policy": "round_robin",
    "prewarm": True,
    "prewarm_timeout_s": 300,
    "handover": True,
    "pin_budget": 0.25,
    "graceful_shutdown_timeout_s": 60,
}
WHOLE = SYSTEM_TOKENS - 2 * BLOCK
"""The minimum of cached tokens of a prompt with a cached system prompt."""


def scale(cluster: LocalCluster, replicas: int) -> None:
    cluster.deploy(application(SETTINGS, {"Replica": {"num_replicas": replicas}}), START_S)
    eventually(lambda: len(replicas_of(cluster.url)) == replicas, START_S)
    wait_for_replicas(cluster.url, replicas)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """One replica at first; requests go in turn, and none of them pulls."""
    with LocalCluster(1) as made:
        scale(made, 1)
        yield made


def test_a_new_replica_has_its_peers_cache(cluster: LocalCluster) -> None:
    """It has it before its first request: every prompt is a hit on both, with the computed answer."""
    url, systems = cluster.url, texts(4, 100)
    (old,) = replicas_of(url)
    answers = [ask(url, body(system))[0] for system in systems]
    for system in systems:
        wait_until_cached(url, body(system), WHOLE)
    scale(cluster, 2)
    (new,) = replicas_of(url).keys() - {old}
    receipt = notices(url, "prewarm")[new]
    assert receipt["blocks"] >= 4 * WHOLE // BLOCK
    assert not receipt["skipped_blocks"]
    assert replicas_of(url)[new]["blocks"]["pool"] >= receipt["blocks"]
    for system, answer in zip(systems, answers, strict=True):
        for _ in range(2):  # one to each
            text, cached = ask(url, body(system))
            assert text == answer
            assert cached >= WHOLE


def test_a_leaving_replica_hands_over_its_cache(cluster: LocalCluster) -> None:
    """Two replicas become one: it hits every prompt, keeps every save, and gives the same answers."""
    url = cluster.url
    requests = [body(system) for system in texts(6, 200)]
    requests += [body(system, save_system_prompt_kv_cache=True) for system in texts(2, 300)]
    answers = ask_at_once(url, requests)
    for request in requests:
        wait_until_cached(url, request, WHOLE)
    before = replicas_of(url)
    scale(cluster, 1)
    gone = before.keys() - replicas_of(url).keys()
    wait_left(url, set(gone))
    (receipt,) = (notices(url, "handover")[name] for name in gone)
    assert receipt["blocks"] > 0
    assert receipt["skipped_blocks"].keys() <= {"held_by_peer"}
    assert receipt["saves_lost"] == 0
    eventually(lambda: all(one["blocks_pinned"] >= 2 * WHOLE // BLOCK for one in replicas_of(url).values()))
    again = ask_at_once(url, requests)
    assert [text for text, _ in again] == [text for text, _ in answers]
    assert min(cached for _, cached in again) >= WHOLE
