"""Replicas that join and leave real Ray Serve, with simulated engines: caches, saves and streams survive both.

Some die in the middle of it: the mortal replicas, which a rolling update starts.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.local import LocalCluster, application
from tests.integration.conftest import (
    HTTP,
    PATIENCE_S,
    alone,
    eventually,
    explained,
    metric,
    replicas_of,
    wait_for_replicas,
    wait_until_cached,
)
from tests.integration.scaling.mortal import FAULTS
from tests.integration.scaling.stage import (
    HELD_TOKENS,
    SETTINGS,
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

pytestmark = [pytest.mark.integration, pytest.mark.long]

DRAIN_S, NO_DRAIN_S = 8, 3
"""The first is enough for a hand-over, but not for a long stream; the second is enough for neither."""
LONG_TOKENS, STREAM_TOKENS = 400, 250
"""8 and 5 seconds."""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that arms mortal replicas."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def cluster(faults: Path) -> Iterator[LocalCluster]:
    root = str(Path(__file__).parents[3])  # lets its processes import modules of this folder
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with alone(LocalCluster(1, env={FAULTS: str(faults), "PYTHONPATH": path})) as made:
        yield made


@pytest.fixture
def url(cluster: LocalCluster) -> str:
    return cluster.url


def scale_mortal(cluster: LocalCluster, replicas: int, *, wait: bool = True) -> None:
    """Deploy with this many mortal replicas; each existing one is replaced, new before old."""
    surge = {"max_surge_percent": 100}
    options = {"Replica": {"num_replicas": replicas, **surge}, "Ingress": surge}
    wanted = application({**SETTINGS, "num_blocks": 700}, options)
    wanted["import_path"] = "tests.integration.scaling.mortal:build_app"
    cluster.deploy(wanted, PATIENCE_S if wait else 0)


def forget(url: str) -> None:
    """Make every replica forget its cache."""
    HTTP.post(f"{url}/reset_prefix_cache").raise_for_status()
    eventually(lambda: not any(replica["blocks"].get("pool") for replica in replicas_of(url).values()))


def asked(url: str, systems: list[str]) -> list[str]:
    """Return the answers to each prompt, once the router knows that all are cached."""
    answers = [text for text, _ in ask_at_once(url, map(body, systems))]
    for system in systems:
        wait_until_cached(url, body(system), HELD_TOKENS)
    return answers


def test_a_leaving_replica_hands_over_its_cache(cluster: LocalCluster, url: str) -> None:
    """Three replicas become one: it hits every prompt, keeps every save, and gives the same answers.

    docs: failures
    """
    scale(cluster, 3)
    wait_for_replicas(url, 3)
    systems, saved = texts(12, 200), texts(3, 300)
    requests = [body(system) for system in systems]
    requests += [body(system, save_system_prompt_kv_cache=True) for system in saved]
    answers = ask_at_once(url, requests)
    assert max(cached for _, cached in answers[:12]) < 64
    for request in requests:
        wait_until_cached(url, request, HELD_TOKENS)
    before = replicas_of(url)
    scale(cluster, 1)
    wait_for_replicas(url, 1)
    (stays,) = replicas_of(url)
    left = before.keys() - {stays}
    wait_left(url, left)
    receipts = [notices(url, "handover")[name] for name in left]
    assert sum(receipt["blocks"] for receipt in receipts) > 0
    assert not any(reason != "held_by_peer" for receipt in receipts for reason in receipt["skipped_blocks"])
    assert sum(receipt["saves_lost"] for receipt in receipts) == 0
    again = ask_at_once(url, map(body, systems + saved))
    assert [text for text, _ in again] == [text for text, _ in answers]
    assert min(cached for _, cached in again) >= HELD_TOKENS
    eventually(lambda: replicas_of(url)[stays]["blocks_pinned"] >= 3 * (SYSTEM_TOKENS // 16 - 1))
    assert metric(url, "warmpath_handover_blocks_total") > 0


@pytest.mark.parametrize("graceful_s", [DRAIN_S, NO_DRAIN_S])
def test_streams_longer_than_the_drain_go_on_elsewhere_token_for_token(
    cluster: LocalCluster, url: str, graceful_s: int
) -> None:
    """Their replica is stopped in the middle; without time for a hand-over only the cache is lost.

    docs: failures
    """
    options = {"graceful_shutdown_timeout_s": graceful_s}
    scale(cluster, 2, **options)
    wait_for_replicas(url, 2)
    before = replicas_of(url)
    disturbed = long_streams(url, 400, LONG_TOKENS, lambda: scale(cluster, 1, wait=False, **options))
    wait_for_replicas(url, 1)
    (left,) = before.keys() - replicas_of(url).keys()
    if graceful_s == DRAIN_S:
        eventually(lambda: notices(url, "handover").get(left, {}).get("blocks", 0) > 0)
    # This comes last, because blocks that another replica holds as well are not handed over.
    assert disturbed == undisturbed(url, 400, LONG_TOKENS)


def test_a_replica_that_cannot_start_takes_no_traffic(cluster: LocalCluster, url: str) -> None:
    """A new version cannot find its model: the remaining old replica answers everything until the roll-back."""
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
    scale(cluster, 1, wait=False)
    wait_for_replicas(url, 1)
    assert ask(url, request)[0] in answers


def test_a_rolling_update_starts_with_the_old_replicas_cache(cluster: LocalCluster, url: str) -> None:
    """The new one copies it before the old one leaves, so its first requests are hits. (docs: failures)"""
    scale(cluster, 1)
    wait_for_replicas(url, 1)
    forget(url)
    (old,) = replicas_of(url)
    systems = texts(5, 700)
    answers = asked(url, systems)
    scale_mortal(cluster, 1)
    wait_left(url, {old})
    wait_for_replicas(url, 1, [old])
    (new,) = replicas_of(url)
    copied, given = notices(url, "prewarm")[new], notices(url, "handover")[old]
    assert copied["blocks"] >= 5 * (SYSTEM_TOKENS // 16)
    assert not copied["skipped_blocks"]
    assert given["blocks"] == 0
    assert set(given["skipped_blocks"]) == {"held_by_peer"}
    wait_until_cached(url, body(systems[-1]), HELD_TOKENS)
    again = [ask(url, body(system)) for system in systems]
    assert [text for text, _ in again] == answers
    assert min(cached for _, cached in again) >= HELD_TOKENS


def test_a_peer_that_dies_in_the_middle_of_a_prewarm(cluster: LocalCluster, url: str, faults: Path) -> None:
    """It gave the prefix that all prompts share: the new replica starts with that, and within its time limit.

    docs: failures
    """
    scale_mortal(cluster, 1)
    wait_for_replicas(url, 1)
    forget(url)
    (dies,) = replicas_of(url)
    (shared,) = texts(1, 800)
    systems = [f"{shared} {text}" for text in texts(4, 810)]
    answers = asked(url, systems)
    (faults / "export_kv").write_text("1")
    scale_mortal(cluster, 2, wait=False)
    wait_for_replicas(url, 2, [dies])
    assert not (faults / "export_kv").exists()
    (receipt,) = (receipt for receipt in notices(url, "prewarm").values() if receipt["peers_lost"])
    assert receipt["peers"] == receipt["peers_lost"] == 1
    assert SYSTEM_TOKENS // 16 <= receipt["blocks"] <= SYSTEM_TOKENS // 16 + 2
    assert set(receipt["skipped_blocks"]) == {"peer_lost"}
    assert receipt["skipped_blocks"]["peer_lost"] >= 4 * (SYSTEM_TOKENS // 16 - 1)
    wait_until_cached(url, body(systems[0]), HELD_TOKENS)
    again = [ask(url, body(system)) for system in systems]
    assert [text for text, _ in again] == answers
    assert again[0][1] >= HELD_TOKENS


def test_a_peer_that_dies_in_the_middle_of_a_hand_over(cluster: LocalCluster, url: str, faults: Path) -> None:
    """Streams on the leaving replica and on the dying one continue unchanged.

    docs: failures
    """
    scale_mortal(cluster, 2)
    wait_for_replicas(url, 2)
    stay = set(replicas_of(url))
    scale_mortal(cluster, 3)
    wait_for_replicas(url, 3)
    forget(url)
    (leaves,) = replicas_of(url).keys() - stay  # Serve stops the newest
    systems = texts(9, 1000)
    answers = asked(url, systems)
    held = [system for system in systems if leaves in holders(url, system)]
    assert held

    def leave() -> None:
        (faults / "take_kv").write_text("0")
        scale_mortal(cluster, 2, wait=False)

    disturbed = long_streams(url, 1100, STREAM_TOKENS, leave)
    wait_left(url, {leaves})
    assert not (faults / "take_kv").exists()
    receipt = notices(url, "handover")[leaves]
    assert receipt["peers_lost"] == 1
    assert set(receipt["skipped_blocks"]) <= {"held_by_peer"}
    eventually(lambda: len(stay & replicas_of(url).keys()) == 1)  # the dead one counts until its death is noticed
    wait_for_replicas(url, 2, [leaves])
    assert disturbed == undisturbed(url, 1100, STREAM_TOKENS)
    again = [ask(url, body(system)) for system in systems]
    assert [text for text, _ in again] == answers
    assert all(cached >= HELD_TOKENS for system, (_, cached) in zip(systems, again, strict=True) if system in held)


def holders(url: str, system: str) -> set[str]:
    """Return the replicas that hold a whole prompt, as far as the router knows."""
    replicas = explained(url, body(system))["replicas"]
    return {replica["replica_id"] for replica in replicas if replica["cached_tokens"] >= HELD_TOKENS}
