"""What one life of an instance computed, the next one reuses: the disk tier through a real restart."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from benchmarks.common.server import instance
from tests.integration.conftest import PATIENCE_S, alone, cache_state, eventually

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"


def ask(url: str, words: str) -> tuple[int, str]:
    body = {
        "model": "demo",
        "messages": [{"role": "system", "content": words * 120}, {"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "temperature": 0,
    }
    answer = httpx.post(url + CHAT, json=body, timeout=PATIENCE_S).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["message"]["content"]


def metric(url: str, name: str) -> float:
    lines = httpx.get(url + "/metrics", timeout=PATIENCE_S).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def test_a_restart_with_the_same_secret_reuses_the_disk_tier(tmp_path: Path) -> None:
    """A pool too small for two prompts: the evicted one comes back from disk, and both do after a restart.

    docs/caching.md
    """
    settings = ["--model", "demo", "--replicas", "1", "--set", "dtype=float32", "--set", "num_blocks=96"]
    settings += ["--set", "tier_load_ratio=1000", "--set", f"disk_cache_dir={tmp_path}"]
    settings += ["--set", "disk_cache_bytes=100000000"]
    env = {"WARMPATH_SECRET": "a secret of the test's own"}
    with alone(instance(*settings, env=env)) as url:
        first = {words: ask(url, words) for words in ("Some words. ", "Other words! ", "Third words? ")}
        assert {cached for cached, _ in first.values()} == {0}
    assert list(tmp_path.glob("slot-0/*.kv"))
    with alone(instance(*settings, env=env)) as url:
        for words, (_, text) in first.items():
            cached, again = ask(url, words)
            assert cached > 100, words
            assert again == text
        eventually(lambda: metric(url, "warmpath_kv_tier_hits_total") > 0)
        # What the next life found on disk, and what came and went since, is what its router knows.
        checks = metric(url, "warmpath_directory_checks_total")
        eventually(lambda: metric(url, "warmpath_directory_checks_total") > checks)
        (replica,) = cache_state(url)["replicas"]
        assert replica["blocks"]["disk"] > 0 and replica["drift"] == {}
        assert metric(url, "warmpath_feed_mirror_drift_total") == 0
