"""The same app from a Serve config file and from `serve run`, on a Ray cluster that was there before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from serve_app.cli.local_ray import held_port
from tests.integration.conftest import PATIENCE_S, eventually

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """A one-node Ray cluster started with `ray start`, as an operator would; yields the environment to reach it."""
    with held_port() as port, held_port() as dashboard:
        address = f"127.0.0.1:{port}"
        # Ray 2.60 starts clusters with token authentication; its command line reads the token only when told to.
        env = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        subprocess.run(
            ["ray", "get-auth-token", "--generate"], env=env, check=True, timeout=300, stdout=subprocess.DEVNULL
        )
        start = ["ray", "start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=4", "--block"]
        start += [f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", "--disable-usage-stats"]
        process = subprocess.Popen(start, env=env, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
        try:
            eventually(lambda: listens(f"http://127.0.0.1:{dashboard}/api/version"))
            yield {
                **env,
                "RAY_ADDRESS": address,
                "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}",
                "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
            }
        finally:
            end(process, signal.SIGTERM, 30)


def end(process: subprocess.Popen[bytes], number: signal.Signals, seconds: float) -> None:
    """Ask a process to end, and end its group where it does not."""
    process.send_signal(number)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def listens(url: str) -> bool:
    """Whether anything at all answers."""
    try:
        httpx.get(url, timeout=PATIENCE_S)
    except httpx.HTTPError:
        return False
    return True


def wait_for_replicas(url: str, count: int, cluster: dict[str, str]) -> None:
    """Wait until the ingress' router knows so many; while the app changes it may not answer. Or say what Serve says."""
    seen: object = None

    def all_are_known() -> bool:
        nonlocal seen
        try:
            response = httpx.get(f"{url}/health", timeout=PATIENCE_S)
            seen = response.json()["replicas"] if response.status_code == 200 else response.status_code
        except (httpx.HTTPError, KeyError, ValueError) as error:
            seen = error
        return seen == count

    try:
        eventually(all_are_known, within_s=300)
    except AssertionError:
        status = subprocess.run(["serve", "status"], env=cluster, cwd=ROOT, capture_output=True, text=True, timeout=300)
        raise AssertionError(f"{url}: never {count} replicas but {seen!r}: {status.stdout[-3000:]}") from None


@pytest.fixture
def port() -> Iterator[int]:
    """A port for the app."""
    with held_port() as held:
        yield held


@pytest.fixture
def shut_down(cluster: dict[str, str]) -> Iterator[None]:
    """Leave the cluster without Serve, whatever the test did: the next one brings its own HTTP options."""
    yield
    subprocess.run(["serve", "shutdown", "-y"], env=cluster, cwd=ROOT, check=True, timeout=300)


def answer(url: str, model: str = "demo") -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.usefixtures("shut_down")
def test_serve_deploy_of_the_config_file(cluster: dict[str, str], port: int, tmp_path: Path) -> None:
    """`serve deploy cluster/serve_config.yaml` serves, and deploying again with other args changes the app in place."""
    config = yaml.safe_load((ROOT / "cluster" / "serve_config.yaml").read_text())
    config["http_options"]["port"] = port
    file = tmp_path / "serve_config.yaml"
    file.write_text(yaml.safe_dump(config))
    subprocess.run(["serve", "deploy", str(file)], env=cluster, cwd=ROOT, check=True, timeout=300)
    url = f"http://127.0.0.1:{port}"
    replicas = config["applications"][0]["args"]["replicas"]
    wait_for_replicas(url, replicas, cluster)
    before = answer(url)

    config["applications"][0]["args"]["replicas"] = replicas + 1
    file.write_text(yaml.safe_dump(config))
    subprocess.run(["serve", "deploy", str(file)], env=cluster, cwd=ROOT, check=True, timeout=300)
    wait_for_replicas(url, replicas + 1, cluster)
    assert answer(url) == before


@pytest.mark.usefixtures("shut_down")
def test_serve_run_of_a_checkpoint_at_a_path(cluster: dict[str, str], tiny_model_path: Path) -> None:
    """`serve run serve_app.app:build_app model=PATH` serves a Llama-style checkpoint on a running cluster."""
    process = subprocess.Popen(
        ["serve", "run", "serve_app.app:build_app", f"model={tiny_model_path}", "replicas=1"],
        env=cluster,
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_replicas("http://127.0.0.1:8000", 1, cluster)
        assert answer("http://127.0.0.1:8000", tiny_model_path.name)
    finally:
        end(process, signal.SIGINT, 60)
