"""Every query of the dashboard shows something of a running instance (simulated engines), to a real Prometheus.

Skipped where Prometheus is not installed. Replicas pull, a third one joins, one tenant is refused: what has no series
after that is named below, with the reason.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.common.server import instance
from serve_app.cli.local_ray import held_port
from serve_app.tenants.tenants import make_api_key
from tests.harness.boards import FOLDER, SERIES, WINDOW
from tests.integration.conftest import PATIENCE_S, alone, eventually

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed (Debian: apt-get install prometheus)"),
]

ACME, LIMITED, OPERATOR = make_api_key(), make_api_key(), make_api_key()
CLERK = "You are a helpful clerk. " * 60
MAY_BE_EMPTY = {
    ("Faults and retries", "retries, {{after_first_token}}"): "no replica is lost",
    ("Drift of the directory", "{{kind}} a second"): "nothing drifts",
    ("Preemptions and computing again", "preemptions a second"): "every sequence fits",
    ("Pulls", "refused: {{reason}}"): "every pull that is planned is worth it",
    ("Blocks handed over by leaving replicas", "{{kind}}"): "no replica leaves",
}
"""Series by panel and legend."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two simulated replicas with a small pool and a tier, to which requests go in turn, and a third one under load."""
    tenants = [
        {"name": "acme", "key_sha256": [ACME[1]]},
        {"name": "limited", "key_sha256": [LIMITED[1]], "requests_per_second": 0.2},
    ]
    settings = {
        "model": "demo",
        "engine": "simulated",
        "simulated_prefill_tokens_per_s": 4000,
        "policy": "round_robin",
        "min_pull_tokens": 64,
        "num_blocks": 400,
        "max_num_seqs": 2,
        "host_cache_bytes": 1 << 24,
        "autoscaling": {"min_replicas": 2, "max_replicas": 3, "target_ttft_s": 0.2, "upscale_delay_s": 1},
        "tenants": tenants,
        "public_prompts": [{"name": "clerk", "version": "1", "text": CLERK}],
        "operator_key_sha256": [OPERATOR[1]],
    }
    file = tmp_path_factory.mktemp("boards") / "settings.yaml"
    file.write_text(yaml.safe_dump(settings))
    with alone(instance("--config", str(file))) as base:
        yield base


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[httpx.Client]:
    """Run Prometheus with the project's own files, on loopback and with shorter times."""
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / "alerts.yaml")]
    (folder / "operator.key").write_text(OPERATOR[0])
    [job] = config["scrape_configs"]
    job["authorization"] = {"type": "Bearer", "credentials_file": str(folder / "operator.key")}
    job["static_configs"] = [{"targets": [target.removeprefix("http://")]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with held_port() as port:
        process = subprocess.Popen(
            [
                str(PROMETHEUS),
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
            ]
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False) as client:
                eventually(lambda: client.get("/-/ready").status_code == 200)
                yield client
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def load(url: str) -> Iterator[None]:
    """Clients that ask about the same prompts again and again, more than the pools hold."""
    ended, numbers = threading.Event(), count()

    def client(key: str, pause_s: float) -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE_S, headers={"authorization": f"Bearer {key}"}) as http:
            while not ended.wait(pause_s):
                number = next(numbers)
                messages = [{"role": "user", "content": f"Question {number}"}]
                body: dict[str, Any] = {"model": "demo", "max_tokens": 8, "messages": messages}
                if number % 4 == 0:
                    body["prompt_ref"] = "clerk@1"
                else:
                    rules = f"Prompt {number % 24}. " + f"Word {number % 24}. " * 200
                    messages.insert(0, {"role": "system", "content": rules})
                http.post("/v1/chat/completions", json=body)

    threads = [threading.Thread(target=client, args=(ACME[0], 0.0)) for _ in range(12)]
    threads.append(threading.Thread(target=client, args=(LIMITED[0], 0.5)))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def has_data(client: httpx.Client, promql: str) -> bool:
    """Whether a query gives a number; dividing nothing by nothing gives none. Raises where it is no query."""
    answer: dict[str, Any] = client.get("/api/v1/query", params={"query": promql.replace(WINDOW, "15s")}).json()
    assert answer["status"] == "success", answer
    return any(not math.isnan(float(series["value"][1])) for series in answer["data"]["result"])


def test_every_panel_shows_something(url: str, tmp_path: Path) -> None:
    """Under a load that makes replicas pull and evict, a tenant be refused, and a third replica join."""
    left = {(series.title, series.legend): series.promql for series in SERIES}
    with prometheus(url, tmp_path) as client:

        def all_shown() -> bool:
            """Strike out what has shown data by now."""
            for key, promql in list(left.items()):
                if has_data(client, promql):
                    del left[key]
            return left.keys() <= MAY_BE_EMPTY.keys()

        try:
            with load(url):
                eventually(all_shown)
        finally:
            print("empty:", {key: MAY_BE_EMPTY.get(key, "NO REASON") for key in left})
        rules = client.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
        assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []

        def targets() -> list[str]:
            return [target["health"] for target in client.get("/api/v1/targets").json()["data"]["activeTargets"]]

        eventually(lambda: targets() == ["up"])  # a scrape under load may have taken longer than its second
