"""The same app from a Serve config file and from `serve run`, on a Ray cluster that was there before."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.common.client import stream_events
from serve_app.cli.checks.catalog import problems
from serve_app.cli.checks.finding import Case
from serve_app.cli.local_ray import held_port
from serve_app.cli.start_failure import innermost
from serve_app.config.live import BadSettings, app_config
from serve_app.tenants.tenants import make_api_key
from tests.integration.conftest import PATIENCE_S, START, eventually

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
        token = subprocess.run(
            ["ray", "get-auth-token", "--generate"], env=env, check=True, timeout=300, stdout=subprocess.PIPE, text=True
        )
        start = ["ray", "start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=4", "--block"]
        start += [f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", "--disable-usage-stats"]
        process = started(start, env)
        try:
            eventually(lambda: listens(f"http://127.0.0.1:{dashboard}/api/version"))
            yield {
                **env,
                "RAY_ADDRESS": address,
                "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}",
                "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
                "RAY_AUTH_TOKEN": token.stdout.split()[-1],
            }
        finally:
            end(process, 30)


def started(start: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """`ray start`, once its node is there. On a busy machine it may take more than 30 s, and then it gives up."""
    for _ in range(3):
        with START:
            process = subprocess.Popen(
                start, env={**env, "PYTHONUNBUFFERED": "1"}, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE
            )
            assert process.stdout is not None
            if any(b"Ray runtime started" in line for line in process.stdout):
                return process
            end(process, 30)
    raise AssertionError("ray start gave up three times")


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Ask a process to end, and end its group where it does not."""
    process.terminate()  # not SIGINT: a shell has its background jobs ignore that
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


def serve(cluster: dict[str, str], verb: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """PUT, GET or DELETE, as `serve deploy`, `status` and `shutdown` do: a command takes seconds to start."""
    response = httpx.request(
        verb,
        f"{cluster['RAY_DASHBOARD_ADDRESS']}/api/serve/applications/",
        headers={"Authorization": f"Bearer {cluster['RAY_AUTH_TOKEN']}"},
        json=config,
        timeout=300,
    )
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json() if verb == "GET" else {}
    return found


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
        raise AssertionError(f"{url}: never {count} replicas but {seen!r}: {messages(cluster)}") from None


@pytest.fixture
def port() -> Iterator[int]:
    """A port for the app."""
    with held_port() as held:
        yield held


@pytest.fixture
def shut_down(cluster: dict[str, str]) -> Iterator[None]:
    """Leave the cluster without Serve, whatever the test did: the next one brings its own HTTP options."""
    yield
    serve(cluster, "DELETE")


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

    config["applications"][0]["args"]["replicas"] = replicas - 1
    serve(cluster, "PUT", config)
    wait_for_replicas(url, replicas - 1, cluster)
    assert answer(url) == before


def messages(cluster: dict[str, str]) -> list[str]:
    """What `serve status` tells of the app and of its deployments."""
    app = serve(cluster, "GET")["applications"]["warmpath"]
    return [app["message"], *(one["message"] for one in app["deployments"].values())]


@pytest.mark.usefixtures("shut_down")
def test_serve_status_says_what_a_start_would(cluster: dict[str, str], port: int) -> None:
    """A typo in settings, a model that is not there: the message ends with the sentence that `warmpath serve` has.

    docs/starting.md
    """
    missing = {"model": "/nope/model", "engine": "simulated"}
    with pytest.raises(BadSettings) as typo:
        app_config({"polcy": "sglang"})
    for args, sentence in (
        ({"polcy": "sglang"}, str(typo.value)),
        (missing, problems("start", Case(app_config(missing)))[0]),
    ):
        config = live_config(port, {})
        config["applications"][0]["args"] = args
        serve(cluster, "PUT", config)
        eventually(lambda sentence=sentence: sentence in map(innermost, messages(cluster)))


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
        end(process, 60)  # the fixture shuts Serve down


KEYS = {name: make_api_key() for name in ("acme", "zeta", "operator")}
OPERATOR = {"Authorization": f"Bearer {KEYS['operator'][0]}"}
CHAT = {
    "model": "demo",
    "messages": [{"role": "system", "content": "You are a clerk. " * 40}, {"role": "user", "content": "Count."}],
    "max_tokens": 160,
    "seed": 7,
    "temperature": 1.0,
}


def tenant(name: str) -> dict[str, Any]:
    """A tenant as a settings file names it."""
    return {"name": name, "key_sha256": [KEYS[name][1]]}


def live_config(port: int, user_config: dict[str, Any]) -> dict[str, Any]:
    """A Serve config of simulated replicas whose answers take some seconds, with these live settings."""
    deployments = [{"name": name, "user_config": user_config} for name in ("Ingress", "Replica")]
    args = {"model": "demo", "engine": "simulated", "replicas": 2, "simulated_decode_step_s": 0.05}
    app = {"name": "warmpath", "route_prefix": "/", "import_path": "serve_app.app:build_app", "args": args}
    http = {"host": "127.0.0.1", "port": port}
    return {"proxy_location": "HeadOnly", "http_options": http, "applications": [app | {"deployments": deployments}]}


class Instance:
    """What operators and tenants see of a deployed app."""

    def __init__(self, url: str) -> None:
        self.url = url

    def state(self) -> dict[str, Any]:
        response = httpx.get(f"{self.url}/v1/cache/state", headers=OPERATOR, timeout=PATIENCE_S)
        found: dict[str, Any] = response.raise_for_status().json()
        return found

    def chat(self, name: str, **body: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEYS[name][0]}"}
        return httpx.post(f"{self.url}/v1/chat/completions", json={**CHAT, **body}, headers=headers, timeout=PATIENCE_S)

    async def stream(self, begun: Event) -> str:
        """Return a streamed answer's text; ``begun`` is set with its first piece."""
        headers, text = {"Authorization": f"Bearer {KEYS['acme'][0]}"}, ""
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            async for event in stream_events(
                client, f"{self.url}/v1/chat/completions", {**CHAT, "stream": True}, headers
            ):
                text += event["choices"][0]["delta"].get("content") or ""
                begun.set()
        return text

    def processes(self) -> tuple[str, dict[str, int]]:
        """Who the ingress and the replicas are."""
        state = self.state()
        return state["router_id"], {replica["replica_id"]: replica["pid"] for replica in state["replicas"]}

    def cached_tokens(self) -> int:
        """How much of the chat's prompt the router believes cached, for acme."""
        answer = httpx.post(
            f"{self.url}/v1/cache/explain", json={**CHAT, "tenant": "acme"}, headers=OPERATOR, timeout=PATIENCE_S
        )
        return int(answer.raise_for_status().json()["prompts"][0]["best_cached_tokens"])

    def count(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = httpx.get(f"{self.url}/metrics", headers=OPERATOR, timeout=PATIENCE_S).text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.usefixtures("shut_down")
def test_a_user_config_changes_the_app_and_restarts_nothing(cluster: dict[str, str], port: int) -> None:
    """Under a running stream: policy, tenants, keys, prompts and limits change, and no process, cache or byte does.

    A user_config with a mistake changes nothing either, is shown, and goes with the next good one.

    docs/cluster.md
    """
    instance = Instance(f"http://127.0.0.1:{port}")

    def deploy(**user_config: object) -> None:
        serve(cluster, "PUT", live_config(port, user_config))

    operators = [KEYS["operator"][1]]
    deploy(tenants=[tenant("acme")], operator_key_sha256=operators, policy="sglang")
    wait_for_replicas(instance.url, 2, cluster)
    assert instance.state()["policy"] == "sglang"
    assert instance.chat("zeta").status_code == 401
    undisturbed = asyncio.run(instance.stream(Event()))
    eventually(lambda: instance.cached_tokens() >= 100)
    eventually(lambda: len(instance.processes()[1]) == 2)
    before, snapshots = instance.processes(), instance.count("warmpath_feed_snapshots_total")

    begun = Event()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(asyncio.run, instance.stream(begun))
        assert begun.wait(PATIENCE_S)
        good = {
            "tenants": [tenant("zeta"), {**tenant("acme"), "cache_share": 3.0}],
            "operator_key_sha256": operators,
            "policy": "lmetric",
            "public_prompts": [{"name": "pirate", "version": "1", "text": "You are a pirate. " * 40}],
            "default_max_tokens": 4,
        }
        deploy(**good)
        eventually(lambda: instance.state()["policy"] == "lmetric")
        assert stream.result() == undisturbed != ""
    eventually(lambda: not any(replica["away"] for replica in instance.state()["replicas"]))
    assert instance.processes() == before
    assert instance.cached_tokens() >= 100
    for policy in ("sglang", "lmetric") * 3:
        if policy == "sglang" and instance.count("warmpath_feed_snapshots_total") == snapshots:
            break
        # A feed that was silent for 5 s, on a machine that stood still, is asked again too: other changes tell.
        snapshots = instance.count("warmpath_feed_snapshots_total")
        deploy(**{**good, "policy": policy})
        eventually(lambda policy=policy: instance.state()["policy"] == policy)
        eventually(lambda: not any(replica["away"] for replica in instance.state()["replicas"]))
    else:
        assert instance.count("warmpath_feed_snapshots_total") == snapshots, "a router learns caches again"
    answer = instance.chat("zeta", messages=CHAT["messages"][1:], prompt_ref="pirate@1", max_tokens=None)  # type: ignore[index]
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert instance.state()["notices"]["configuration"] == []

    deploy(**{**good, "tenants": [], "polcy": "sglang"})
    eventually(lambda: len(instance.state()["notices"]["configuration"]) == 3)
    for notice in instance.state()["notices"]["configuration"]:
        assert notice["accepted"] is False and "did you mean policy?" in notice["why"]
    eventually(lambda: instance.count("warmpath_refused_configurations_total") == 3)
    assert instance.processes() == before
    assert instance.state()["policy"] == "lmetric"
    assert instance.chat("zeta", max_tokens=2).status_code == 200

    deploy(**{**good, "tenants": [tenant("acme")]})
    eventually(lambda: instance.chat("zeta", max_tokens=2).status_code == 401)
    eventually(lambda: instance.state()["notices"]["configuration"] == [])
    assert instance.processes() == before
    assert instance.chat("acme").json()["choices"][0]["message"]["content"] == undisturbed

    begun = Event()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(asyncio.run, instance.stream(begun))
        assert begun.wait(PATIENCE_S)
        revoked = {"name": "acme", "key_sha256": [{"sha256": KEYS["acme"][1], "revoked": True}]}
        deploy(**{**good, "tenants": [revoked, {**tenant("zeta"), "tokens_per_minute": 500}]})
        eventually(lambda: "revoked" in instance.chat("acme", max_tokens=2).text)
        assert stream.result() == undisturbed, "what has begun goes on"
    assert instance.chat("acme", max_tokens=2).status_code == 401
    too_many = instance.chat("zeta", max_tokens=400)
    assert (too_many.status_code, too_many.headers["x-ratelimit-limit-tokens"]) == (429, "500")
    assert instance.processes() == before
