"""Replicas that join and leave real Ray Serve, with simulated engines: caches, saves and streams survive both."""

from __future__ import annotations

import os
import signal

import httpx
import pytest

from cluster.local import LocalCluster
from tests.integration.conftest import PATIENCE_S, eventually, replicas_of, wait_for_replicas, wait_until_cached
from tests.integration.scaling.stage import (
    SYSTEM_TOKENS,
    ask,
    ask_at_once,
    body,
    long_streams,
    notices,
    scale,
    texts,
    undisturbed,
    wait_left,
)

pytestmark = pytest.mark.integration

DRAIN_S, NO_DRAIN_S = 9, 3
"""Both shorter than a long stream; the second leaves no time for a hand-over."""
LONG_TOKENS = 600
"""12 seconds."""


def test_a_new_replica_has_what_its_peer_had_before_its_first_request(cluster: LocalCluster) -> None:
    """The only peer is killed once the new one runs: what is cached then came with the pre-warm."""
    scale(cluster, 1)
    url = cluster.url
    wait_for_replicas(url, 1)
    (old,) = replicas_of(url)
    systems = texts(5, 100)
    answers = [ask(url, body(system))[0] for system in systems]
    wait_until_cached(url, body(systems[-1]), SYSTEM_TOKENS - 16)
    scale(cluster, 2)
    wait_for_replicas(url, 2)
    (new,) = replicas_of(url).keys() - {old}
    receipt = notices(url, "prewarm")[new]
    assert receipt["blocks"] >= 5 * (SYSTEM_TOKENS // 16 - 1)
    assert not receipt["skipped_blocks"]
    assert replicas_of(url)[new]["blocks"]["pool"] >= receipt["blocks"]
    os.kill(int(replicas_of(url)[old]["pid"]), signal.SIGKILL)
    for system, answer in zip(systems, answers, strict=True):
        text, cached = ask(url, body(system))
        assert text == answer
        assert cached >= SYSTEM_TOKENS - 16
    wait_for_replicas(url, 2, [old])


def test_what_a_leaving_replica_held_is_cached_where_it_was_not(cluster: LocalCluster) -> None:
    """Three become one: every prompt is a hit there, a save is still one, and every answer is the same."""
    url = cluster.url
    scale(cluster, 3)
    wait_for_replicas(url, 3)
    systems, saved = texts(12, 200), texts(3, 300)
    save = {"save_system_prompt_kv_cache": True}

    requests = [body(system) for system in systems] + [body(system, **save) for system in saved]
    answers = ask_at_once(url, requests)
    assert max(cached for _, cached in answers[:12]) < 64
    for request in requests:
        wait_until_cached(url, request, SYSTEM_TOKENS - 16)
    before = replicas_of(url)
    scale(cluster, 1)
    wait_for_replicas(url, 1)
    (stays,) = replicas_of(url)
    gone = before.keys() - {stays}
    wait_left(url, set(gone))
    receipts = [notices(url, "handover")[name] for name in gone]
    assert sum(receipt["blocks"] for receipt in receipts) > 0
    assert not any(reason != "held_by_peer" for receipt in receipts for reason in receipt["skipped_blocks"])
    assert sum(receipt["saves_lost"] for receipt in receipts) == 0
    again = ask_at_once(url, [body(system) for system in systems + saved])
    assert [text for text, _ in again] == [text for text, _ in answers]
    assert min(cached for _, cached in again) >= SYSTEM_TOKENS - 16
    eventually(lambda: replicas_of(url)[stays]["blocks_pinned"] >= 3 * (SYSTEM_TOKENS // 16 - 1))
    metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    assert "warmpath_handover_blocks_total" in metrics


@pytest.mark.parametrize("graceful_s", [DRAIN_S, NO_DRAIN_S])
def test_streams_longer_than_the_drain_go_on_elsewhere_token_for_token(cluster: LocalCluster, graceful_s: int) -> None:
    """Their replica is stopped in the middle; without time for a hand-over cache is lost, and nothing else.

    docs/lifecycle.md
    """
    url, options = cluster.url, {"graceful_shutdown_timeout_s": graceful_s}
    scale(cluster, 2, **options)
    wait_for_replicas(url, 2)
    before = replicas_of(url)
    disturbed = long_streams(url, 400, LONG_TOKENS, lambda: scale(cluster, 1, wait=False, **options))
    wait_for_replicas(url, 1)
    (gone,) = before.keys() - replicas_of(url).keys()
    if graceful_s == DRAIN_S:
        eventually(lambda: notices(url, "handover").get(gone, {}).get("blocks", 0) > 0)
    # Not before: what another replica holds as well is not handed over.
    assert disturbed == undisturbed(url, 400, LONG_TOKENS)


def test_a_replica_that_cannot_start_takes_no_traffic(cluster: LocalCluster) -> None:
    """A new version whose model is not there: the old replica that is left answers everything, until the way back."""
    url = cluster.url
    scale(cluster, 2)
    wait_for_replicas(url, 2)
    before = set(replicas_of(url))
    broken = {"num_cpus": 0.1, "runtime_env": {"env_vars": {"XDG_CACHE_HOME": "/proc/nothing"}}}
    scale(cluster, 2, wait=False, ray_actor_options=broken)
    request, answers = body(texts(1, 500)[0]), set()

    def given_up() -> bool:
        answers.add(ask(url, request)[0])
        assert set(replicas_of(url)) <= before
        return str(cluster.status()["status"]) == "DEPLOY_FAILED"

    eventually(given_up, 300.0)
    assert len(answers) == 1
    scale(cluster, 2, wait=False)
    wait_for_replicas(url, 2)
    assert ask(url, request)[0] in answers


def test_a_prewarm_survives_a_peer_that_hangs_and_dies(cluster: LocalCluster) -> None:
    """What the other peer holds is there; the start takes no longer than its budget."""
    url = cluster.url
    scale(cluster, 2)
    wait_for_replicas(url, 2)
    for text in texts(4, 600):
        ask(url, body(text))
    before = replicas_of(url)
    hangs = int(before[min(before)]["pid"])
    os.kill(hangs, signal.SIGSTOP)
    try:
        scale(cluster, 3, wait=False)
        eventually(lambda: len(cluster.processes("Replica")) > 2)
    finally:
        os.kill(hangs, signal.SIGKILL)
    wait_for_replicas(url, 3, [min(before)])
    new = replicas_of(url).keys() - before.keys()
    assert any(notices(url, "prewarm")[name]["blocks"] > 0 for name in new)
