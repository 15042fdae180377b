"""Models at zero on real Ray Serve: however long they slept, the next request starts one, and all that come wait."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.common.server import instance
from tests.integration.conftest import HTTP, alone, eventually, metric

pytestmark = [pytest.mark.integration, pytest.mark.long]

WAIT_S = 3.0
"""Less than a start takes: requests outlast it while Serve starts a replica."""
SCALED = "autoscaling: {min_replicas: 0, max_replicas: 1, downscale_delay_s: 10s}"
MODELS = f"""
replica_num_cpus: 0.1
engine: simulated
no_replica_wait_s: {WAIT_S:g}s
models:
  - {{model: demo, served_model_name: sleeper, {SCALED}}}
  - {{model: demo, served_model_name: covered, fallback: awake, {SCALED}}}
  - {{model: demo, served_model_name: awake, replicas: 1}}
"""
SLEEPERS = ("sleeper", "covered")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("zero")
    (folder / "models.yaml").write_text(f"{MODELS}\nresponses_file: {folder}/responses.sqlite\n")
    with alone(instance("--config", str(Path(folder / "models.yaml")))) as base:
        yield base


def body(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 4, **more}


def ask(url: str, model: str, **more: Any) -> httpx.Response:
    answer = HTTP.post(f"{url}/v1/chat/completions", json=body(model, **more))
    assert answer.status_code == 200, answer.text
    return answer


def replicas(url: str, model: str) -> int:
    return int(HTTP.get(f"{url}/health").json()["models"][model]["replicas"])


def sleep_past_every_limit(url: str, *models: str) -> None:
    """Wait until models are at zero, and then for three times as long as a request waits there."""
    for model in models:
        eventually(lambda model=model: replicas(url, model) == 0, 300)  # type: ignore[misc]
    asleep_s = time.monotonic()
    eventually(lambda: time.monotonic() > asleep_s + 3 * WAIT_S)


def test_after_any_sleep_the_next_requests_start_one(url: str) -> None:
    """Twice, because the first start from zero has no time without replicas before it. docs: autoscaling"""
    for _ in range(2):
        sleep_past_every_limit(url, "sleeper")
        shown = HTTP.get(f"{url}/v1/cache/events?once=true&model=sleeper").json()
        assert shown["from_zero"] and all(row["state"] == "leaving" for row in shown["replicas"])
        assert not any(event["type"] == "replica_left" and event["lost"] for event in shown["incidents"])
        with ThreadPoolExecutor(8) as pool:
            each = ({"stream": number % 2 == 1, "priority": number} for number in range(8))
            asked = [pool.submit(ask, url, "sleeper", **more) for more in each]
            assert sum("sleeper" in one.result().text for one in asked) == 8


def test_a_batch_starts_one_and_its_lines_wait_for_it(url: str) -> None:
    sleep_past_every_limit(url, *SLEEPERS)
    for model in SLEEPERS:
        lines = "\n".join(
            json.dumps({"custom_id": str(at), "method": "POST", "url": "/v1/chat/completions", "body": body(model)})
            for at in range(4)
        )
        file = HTTP.post(f"{url}/v1/files", files={"file": ("b.jsonl", lines)}, data={"purpose": "batch"}).json()
        made = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        at = f"{url}/v1/batches/{HTTP.post(f'{url}/v1/batches', json=made).json()['id']}"
        eventually(lambda at=at: HTTP.get(at).json()["status"] == "completed", 300)  # type: ignore[misc]
        results = HTTP.get(f"{url}/v1/files/{HTTP.get(at).json()['output_file_id']}/content").text.splitlines()
        assert [json.loads(one)["response"]["body"]["model"] for one in results] == [model] * 4


def test_a_fallback_answers_meanwhile_and_the_model_starts_for_it(url: str) -> None:
    """docs: cluster"""
    sleep_past_every_limit(url, "covered")
    answer = ask(url, "covered")
    assert answer.json()["model"] == "awake"
    assert answer.headers["x-warmpath-warning"] == "covered is asleep: its fallback answers"
    eventually(lambda: replicas(url, "covered") == 1, 300)
    eventually(lambda: ask(url, "covered").json()["model"] == "covered")
    assert metric(url, "warmpath_fallbacks_total", 'cause="asleep"') >= 1
