"""Peers that die, or are full, in the middle of a pre-warm or a hand-over: it goes on, and no answer is another one.

The replicas are mortal ones, which a rolling update brings.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from cluster.local import LocalCluster, application
from tests.integration.conftest import PATIENCE_S, eventually, replicas_of, wait_for_replicas, wait_until_cached
from tests.integration.scaling.stage import (
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

pytestmark = pytest.mark.integration

POOL_BLOCKS = 700
LONG_TOKENS, LONG_BLOCKS = 2600, 2600 // 16
"""Of a prompt of which four fill a pool."""
STREAM_TOKENS = 300
"""6 seconds, within which all streams must have begun. One pool holds them all beside nine prompts."""


def scale_mortal(cluster: LocalCluster, replicas: int, *, wait: bool = True) -> None:
    """Deploy with so many mortal replicas; where there were others, each is replaced, the new one first."""
    surge = {"max_surge_percent": 100}
    options = {"Replica": {"num_replicas": replicas, **surge}, "Ingress": surge}
    wanted = application({**SETTINGS, "num_blocks": POOL_BLOCKS}, options)
    wanted["import_path"] = "tests.integration.scaling.mortal:build_app"
    cluster.deploy(wanted, PATIENCE_S if wait else 0)


def forget(url: str) -> None:
    """Have every replica forget what it has cached."""
    httpx.post(f"{url}/reset_prefix_cache", timeout=PATIENCE_S).raise_for_status()
    eventually(lambda: not any(replica["blocks"].get("pool") for replica in replicas_of(url).values()))


def holders(url: str, systems: list[str], tokens: int = SYSTEM_TOKENS) -> dict[str, set[str]]:
    """Which of these prompts each replica has whole, as the router has heard by now."""
    held: dict[str, set[str]] = {name: set() for name in replicas_of(url)}
    for system in systems:
        answer = httpx.post(f"{url}/v1/cache/explain", json=body(system), timeout=PATIENCE_S).json()
        for replica in answer["prompts"][0]["replicas"]:
            if replica["cached_tokens"] >= tokens - 16:
                held[replica["replica_id"]].add(system)
    return held


def test_a_rolling_update_starts_with_what_the_old_replica_had(cluster: LocalCluster) -> None:
    """The new one copies it before the old one leaves, so its first requests are hits. (docs/lifecycle.md)"""
    scale(cluster, 1)
    url = cluster.url
    wait_for_replicas(url, 1)
    forget(url)
    (old,) = replicas_of(url)
    systems = texts(5, 700)
    answers = [ask(url, body(system))[0] for system in systems]
    wait_until_cached(url, body(systems[-1]), SYSTEM_TOKENS - 16)
    scale_mortal(cluster, 1)
    wait_left(url, {old})
    wait_for_replicas(url, 1, [old])
    (new,) = replicas_of(url)
    copied, given = notices(url, "prewarm")[new], notices(url, "handover")[old]
    assert copied["blocks"] >= 5 * (SYSTEM_TOKENS // 16)
    assert not copied["skipped_blocks"]
    assert given["blocks"] == 0
    assert set(given["skipped_blocks"]) == {"held_by_peer"}
    wait_until_cached(url, body(systems[-1]), SYSTEM_TOKENS - 16)
    for system, answer in zip(systems, answers, strict=True):
        text, cached = ask(url, body(system))
        assert text == answer
        assert cached >= SYSTEM_TOKENS - 16


def test_a_peer_that_dies_in_the_middle_of_a_prewarm(cluster: LocalCluster, faults: Path) -> None:
    """It gave the beginning that all prompts share: the new replica starts with that, and within its time.

    docs/lifecycle.md
    """
    url = cluster.url
    scale_mortal(cluster, 1)
    wait_for_replicas(url, 1)
    forget(url)
    (dies,) = replicas_of(url)
    (shared,) = texts(1, 800)
    systems = [f"{shared} {text}" for text in texts(4, 810)]
    answers = [ask(url, body(system))[0] for system in systems]
    wait_until_cached(url, body(systems[-1]), 2 * SYSTEM_TOKENS - 16)
    (faults / "export_kv").write_text("1")
    scale_mortal(cluster, 2, wait=False)
    wait_for_replicas(url, 2, [dies])
    assert not (faults / "export_kv").exists()
    (receipt,) = (one for one in notices(url, "prewarm").values() if one["peers_lost"])
    assert receipt["peers"] == receipt["peers_lost"] == 1
    assert SYSTEM_TOKENS // 16 <= receipt["blocks"] <= SYSTEM_TOKENS // 16 + 2
    assert set(receipt["skipped_blocks"]) == {"peer_lost"}
    assert receipt["skipped_blocks"]["peer_lost"] >= 4 * (SYSTEM_TOKENS // 16 - 1)
    wait_until_cached(url, body(systems[0]), SYSTEM_TOKENS - 16)
    got = [ask(url, body(system)) for system in systems]
    assert [text for text, _ in got] == answers
    assert got[0][1] >= SYSTEM_TOKENS - 16


def test_a_full_peer_is_passed_over(cluster: LocalCluster) -> None:
    """Full of what is hotter than what the leaving one has: that goes to the other one, in place of what is colder.

    docs/lifecycle.md
    """
    url = cluster.url
    scale_mortal(cluster, 2)
    wait_for_replicas(url, 2)
    stay = set(replicas_of(url))
    scale_mortal(cluster, 3)
    wait_for_replicas(url, 3)
    forget(url)
    (leaves,) = replicas_of(url).keys() - stay  # Serve stops the newest
    systems = texts(18, 900, LONG_TOKENS)
    answers = dict(zip(systems, ask_at_once(url, map(body, systems)), strict=True))
    wait_until_cached(url, body(systems[-1]), LONG_TOKENS - 16)
    held = holders(url, systems, LONG_TOKENS)
    full = max(stay, key=lambda name: len(held[name]))
    assert len(held[full]) >= 3
    assert len(held[leaves]) >= 2
    for system in held[leaves]:
        ask(url, body(system))
    for system in list(held[full]) * 5:
        ask(url, body(system))
    scale_mortal(cluster, 2, wait=False)
    wait_left(url, {leaves})
    receipt = notices(url, "handover")[leaves]
    assert receipt["peers_lost"] == 0
    assert receipt["blocks"] >= len(held[leaves]) * LONG_BLOCKS
    for system in held[full] | held[leaves]:
        text, cached = ask(url, body(system))
        assert text == answers[system][0]
        assert cached >= LONG_TOKENS - 16


def test_a_peer_that_dies_in_the_middle_of_a_hand_over(cluster: LocalCluster, faults: Path) -> None:
    """Streams run on all three, so some lose the replica that leaves, or the one that dies: all go on as they were.

    docs/lifecycle.md
    """
    url = cluster.url
    scale_mortal(cluster, 2)
    wait_for_replicas(url, 2)
    stay = set(replicas_of(url))
    scale_mortal(cluster, 3)
    wait_for_replicas(url, 3)
    forget(url)
    (leaves,) = replicas_of(url).keys() - stay
    systems = texts(9, 1000)
    answers = dict(zip(systems, ask_at_once(url, map(body, systems)), strict=True))
    wait_until_cached(url, body(systems[-1]), SYSTEM_TOKENS - 16)
    held = holders(url, systems)[leaves]
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
    eventually(lambda: len(stay & replicas_of(url).keys()) == 1)  # who died is known until its death is noticed
    wait_for_replicas(url, 2, [leaves])
    assert disturbed == undisturbed(url, 1100, STREAM_TOKENS)
    for system, (answer, _) in answers.items():
        text, cached = ask(url, body(system))
        assert text == answer
        assert cached >= SYSTEM_TOKENS - 16 or system not in held
