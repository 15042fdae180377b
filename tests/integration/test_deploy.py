"""The same app from Serve config files, on an existing Ray cluster; live settings change it in place."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from serve_app.cli.checks.finding import Look
from serve_app.cli.checks.run import findings
from serve_app.cli.local_ray import held_port
from serve_app.config.live import BadSettings, app_config
from serve_app.errors import innermost
from serve_app.ingress.connections import CALLBACK, CLIENT_HEADERS
from serve_app.replay.client import stream_events
from serve_app.tenants import make_api_key
from tests.harness.prometheus import prometheus
from tests.integration.conftest import (
    HTTP,
    PATIENCE_S,
    START,
    cache_state,
    clients,
    eventually,
    explained,
    metric,
    wait_until_cached,
)

pytestmark = [pytest.mark.integration, pytest.mark.long]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
KEYS = {name: make_api_key() for name in ("acme", "zeta", "operator")}
CHAT = {
    "model": "demo",
    "messages": [{"role": "system", "content": "You are a clerk. " * 40}, {"role": "user", "content": "Count."}],
    "max_tokens": 100,
    "seed": 7,
    "temperature": 1.0,
}


class Cluster:
    """A one-node Ray cluster and the app deployed on it. ``env``: the environment for commands that connect to it."""

    def __init__(self, dashboard: str, env: dict[str, str], port: int) -> None:
        self.env = env
        self.url = f"http://127.0.0.1:{port}"
        self._dashboard = dashboard
        self._port = port

    def serve(self, verb: str, config: dict[str, Any] | None = None) -> Any:
        """PUT, GET or DELETE, as `serve deploy`, `status` and `shutdown` do: a command takes seconds to start."""
        key = {"Authorization": f"Bearer {self.env['RAY_AUTH_TOKEN']}"}
        response = HTTP.request(verb, f"{self._dashboard}/api/serve/applications/", headers=key, json=config)
        assert response.status_code == 200, response.text
        return response.json() if verb == "GET" else None

    def config(self, *applications: dict[str, Any]) -> dict[str, Any]:
        """Return a Serve config file of these applications, on this cluster's port."""
        http = {"host": "127.0.0.1", "port": self._port}
        return {"proxy_location": "HeadOnly", "http_options": http, "applications": list(applications)}

    def deploy_args(self, args: dict[str, Any], user_config: dict[str, Any] | None = None) -> None:
        """Deploy the app with settings and live settings."""
        app = {"name": "warmpath", "route_prefix": "/", "import_path": "serve_app:build_app", "args": args}
        live = [{"name": name, "user_config": user_config} for name in ("Ingress", "Replica")] if user_config else []
        self.serve("PUT", self.config({**app, "deployments": live}))

    def messages(self) -> list[str]:
        """Return the messages of the app and its deployments in `serve status`."""
        app = self.serve("GET")["applications"]["warmpath"]
        return [app["message"], *(deployment["message"] for deployment in app["deployments"].values())]

    def wait_for_replicas(self, count: int) -> None:
        """Wait until the ingress' router knows this many replicas. While the app changes it may not answer."""
        try:
            eventually(lambda: HTTP.get(f"{self.url}/health").raise_for_status().json()["replicas"] == count, 300)
        except AssertionError as error:
            raise AssertionError(f"never {count} replicas: {self.messages()}") from error

    def chat(self, name: str, **body: object) -> httpx.Response:
        return HTTP.post(f"{self.url}/v1/chat/completions", json={**CHAT, **body}, headers=bearer(name))


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name][0]}"}


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    """Ray started with `ray start`, as an operator would."""
    with held_port() as port, held_port() as dashboard, held_port() as app:
        # Ray 2.60 starts clusters with token authentication; its command line reads the token only if the mode is set.
        path = f"{BIN}:{os.environ['PATH']}"
        env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "PATH": path}
        env[CALLBACK] = CLIENT_HEADERS  # docs: isolation
        token = subprocess.check_output(["ray", "get-auth-token", "--generate"], env=env, timeout=300, text=True)
        start = ["ray", "start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=4", "--block"]
        start += [f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", "--disable-usage-stats"]
        process, api = started(start, env), f"http://127.0.0.1:{dashboard}"
        env |= {"RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_API_SERVER_ADDRESS": api, "RAY_AUTH_TOKEN": token.split()[-1]}
        try:
            eventually(lambda: HTTP.get(f"{api}/api/version").status_code > 0)
            made = Cluster(api, {**env, "RAY_DASHBOARD_ADDRESS": api}, app)
            yield made
            made.serve("DELETE")  # else the node waits half a minute for Serve to end
        finally:
            end(process, 30)


@pytest.fixture
def cluster(ray: Cluster) -> Iterator[Cluster]:
    """The cluster; afterwards it has no application."""
    yield ray
    ray.serve("PUT", ray.config())
    eventually(lambda: not ray.serve("GET")["applications"])


@pytest.fixture(scope="module")
def open_app(ray: Cluster) -> Iterator[Cluster]:
    """The cluster with an app that needs no keys."""
    ray.deploy_args({"model": "demo", "engine": "simulated", "replicas": 1, "replica_num_cpus": 0.1})
    ray.wait_for_replicas(1)
    yield ray
    ray.serve("PUT", ray.config())
    eventually(lambda: not ray.serve("GET")["applications"])


def started(start: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Run `ray start` until its node is up: on a busy machine it may exceed its 30 s, and then it gives up."""
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
    """Ask a process to end, and kill its group if it does not."""
    process.terminate()  # not SIGINT: a shell makes its background jobs ignore it
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_serve_status_has_the_errors_of_a_start(cluster: Cluster) -> None:
    """For a typo in settings or a missing model, the message ends with the sentence of `warmpath serve`.

    docs: failures
    """
    missing = {"model": "/nope/model", "engine": "simulated"}
    with pytest.raises(BadSettings) as typo:
        app_config({"polcy": "sglang"})
    for args, sentence in (
        ({"polcy": "sglang"}, str(typo.value)),
        (missing, next(findings(Look("start", app_config(missing)), "model")).sentence),
    ):
        cluster.deploy_args(args)
        eventually(lambda sentence=sentence: sentence in map(innermost, cluster.messages()))


def test_serve_deploy_of_the_config_file(cluster: Cluster, tmp_path: Path) -> None:
    """`serve deploy cluster/serve_config.yaml` serves, and deploying again with other args changes the app in place.

    Ray Serve runs in its own mode here, not in the mode of `warmpath serve`; requests find their prefix in it, too.
    """
    config = yaml.safe_load((ROOT / "cluster" / "serve_config.yaml").read_text())
    config["http_options"] = cluster.config()["http_options"]
    args = config["applications"][0]["args"]
    args["engine"] = "simulated"  # the file's other settings all take less time
    file = tmp_path / "serve_config.yaml"
    file.write_text(yaml.safe_dump(config))
    subprocess.run(["serve", "deploy", str(file)], env=cluster.env, cwd=ROOT, check=True, timeout=300)
    cluster.wait_for_replicas(args["replicas"])
    before = cluster.chat("acme", max_tokens=4).json()["choices"]
    wait_until_cached(cluster.url, CHAT)
    again = [cluster.chat("acme", max_tokens=1).json()["usage"]["prompt_tokens_details"] for _ in range(8)]
    assert min(details["cached_tokens"] for details in again) >= 100, "a request went to a replica without its prefix"
    args["replicas"] -= 1
    cluster.serve("PUT", config)
    cluster.wait_for_replicas(args["replicas"])
    assert cluster.chat("acme", max_tokens=4).json()["choices"] == before


def test_an_engine_without_cache_copies_or_saves_answers_in_the_same_replica(cluster: Cluster) -> None:
    """It is one small file (`tiny_engine.py`); what it lacks is off, and said."""
    app = {"name": "warmpath", "route_prefix": "/", "import_path": "tests.integration.tiny_engine:build"}
    args = {"model": "demo", "engine": "simulated", "replicas": 2}
    cluster.serve("PUT", cluster.config({**app, "args": args, "runtime_env": {"env_vars": {"PYTHONPATH": str(ROOT)}}}))
    cluster.wait_for_replicas(2)
    for save in (False, True):
        answer = cluster.chat("acme", save_system_prompt_kv_cache=save)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (100, 0)
    assert "not saved" in answer.headers["x-warmpath-warning"]
    for other in range(8):
        body = {"messages": [{"role": "user", "content": f"{other} " * 50}]}
        assert len(HTTP.post(f"{cluster.url}/v1/chat/completions", json={**CHAT, **body}).json()["choices"]) == 1
    assert not any(replica["away"] for replica in cache_state(cluster.url)["replicas"])


def tenant(name: str, **limits: object) -> dict[str, Any]:
    """Return a tenant's entry for a settings file."""
    return {"name": name, "key_sha256": [KEYS[name][1]], **limits}


def test_two_applications_share_what_is_in_their_database(cluster: Cluster, tmp_path: Path) -> None:
    """Keys that operators make, stored responses and budgets are of both; each tenant sees its own alone.

    docs: cluster
    """
    limited = tenant("acme", budget={"tokens": 150, "period": "month"}), tenant("zeta")
    shared = {"model": "demo", "engine": "simulated", "replicas": 1, "replica_num_cpus": 0.1, "enable_docs": True}
    shared |= {"responses_file": str(tmp_path / "shared.sqlite"), "operator_key_sha256": [KEYS["operator"][1]]}
    app = {"import_path": "serve_app:build_app", "args": {**shared, "tenants": list(limited)}}
    prefixes = {"one": "", "two": "/two"}
    apps = [{**app, "name": name, "route_prefix": prefix or "/"} for name, prefix in prefixes.items()]
    cluster.serve("PUT", cluster.config(*apps))
    for prefix in prefixes.values():
        eventually(lambda prefix=prefix: HTTP.get(f"{cluster.url}{prefix}/health").status_code == 200, 300)

    def ask(prefix: str, key: str, **body: object) -> httpx.Response:
        asked = {"model": "demo", "input": "Hi", "max_output_tokens": 8, **body}
        return HTTP.post(f"{cluster.url}{prefix}/v1/responses", json=asked, headers={"Authorization": f"Bearer {key}"})

    acme, zeta = KEYS["acme"][0], KEYS["zeta"][0]
    first = ask("", acme)
    assert first.status_code == 200, first.text
    later = {"previous_response_id": first.json()["id"]}
    assert ask("/two", acme, **later).status_code == 200
    assert ask("/two", zeta, **later).json()["error"]["code"] == "previous_response_not_found"
    for path, body in (("/v1/admin/tenants", {"name": "mia"}), ("/v1/admin/keys", {"tenant": "mia"})):
        answer = HTTP.post(f"{cluster.url}{path}", json=body, headers=bearer("operator")).raise_for_status()
    key = answer.json()["key"]
    eventually(lambda: ask("/two", key).status_code == 200)
    HTTP.post(
        f"{cluster.url}/two/v1/admin/keys/{answer.json()['id']}", json={"disabled": True}, headers=bearer("operator")
    )
    eventually(lambda: ask("", key).status_code == 401)
    eventually(lambda: ask("", acme).status_code == 429)
    eventually(lambda: ask("/two", acme).json()["error"]["code"] == "budget_spent")
    assert ask("/two", zeta).status_code == 200
    docs = HTTP.get(f"{cluster.url}/two/docs", headers=bearer("operator")).text
    assert '"docs/swagger-ui.css"' in docs, "relative, so its own"
    assert HTTP.get(f"{cluster.url}/two", follow_redirects=True).status_code == 200


def test_warmpath_stop_finishes_answers(cluster: Cluster) -> None:
    """New requests get a 503 meanwhile, and then nothing runs on the cluster. docs: cluster"""
    args = {
        "model": "demo",
        "engine": "simulated",
        "replicas": 1,
        "replica_num_cpus": 0.1,
        "simulated_decode_step_s": 0.1,
    }
    cluster.deploy_args(args)
    cluster.wait_for_replicas(1)
    url, body = f"{cluster.url}/v1/chat/completions", {**CHAT, "stream": True, "ignore_eos": True}
    with HTTP.stream("POST", url, json={**body, "max_tokens": 150}) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        assert next(lines)
        stop = subprocess.Popen(
            [BIN / "warmpath", "stop", "-y", "--timeout-s=100"],
            env=cluster.env,
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        eventually(lambda: HTTP.get(f"{cluster.url}/health").json()["status"] == "stopping")
        refused = HTTP.post(url, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")
        assert [*lines][-1] == "data: [DONE]"
    told = stop.communicate(timeout=PATIENCE_S)[1]
    assert (stop.returncode, "stopping warmpath: answers under way have 100 s" in told) == (0, True), told
    assert "Traceback" not in told and "not whole" not in told
    again = subprocess.run(
        [BIN / "warmpath", "stop", "-y"], env=cluster.env, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False
    )
    assert (again.returncode, "no application runs on this cluster" in again.stderr) == (2, True), again.stderr


def test_a_user_config_changes_the_app_and_restarts_nothing(cluster: Cluster) -> None:
    """Under a running stream: policy, tenants, keys, prompts and limits change, and no process, cache or byte does.

    A user_config with a mistake changes nothing either, is reported, and disappears with the next valid one.

    docs: cluster
    """
    operators = [KEYS["operator"][1]]

    def deploy(**user_config: object) -> None:
        # Simulated replicas with answers of some seconds.
        args = {"model": "demo", "engine": "simulated", "replicas": 2, "simulated_decode_step_s": 0.05}
        cluster.deploy_args(args, {"operator_key_sha256": operators, **user_config})

    def state() -> dict[str, Any]:
        return cache_state(cluster.url, bearer("operator"))

    def processes() -> tuple[str, dict[str, int]]:
        """Return the ids of the ingress' router and of the replicas, with the replicas' pids."""
        found = state()
        return found["router_id"], {replica["replica_id"]: replica["pid"] for replica in found["replicas"]}

    def nobody_is_away() -> bool:
        return not any(replica["away"] for replica in state()["replicas"])

    def cached_tokens() -> int:
        """Return the router's number of cached tokens of the chat's prompt, for acme."""
        return int(explained(cluster.url, {**CHAT, "tenant": "acme"}, bearer("operator"))["best_cached_tokens"])

    def stream_beside(change: dict[str, Any], applied: str) -> str:
        """Return a streamed answer of acme's during which settings change, including the policy."""
        begun = Event()

        async def stream() -> str:
            text = ""
            async with clients(cluster.url) as client:
                body = {**CHAT, "stream": True}
                async for event in stream_events(client, "/v1/chat/completions", body, bearer("acme")):
                    text += event["choices"][0]["delta"].get("content") or ""
                    begun.set()
            return text

        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(asyncio.run, stream())
            assert begun.wait(PATIENCE_S)
            deploy(**change)
            eventually(lambda: state()["policy"] == applied)
            return answer.result()

    deploy(tenants=[tenant("acme")], policy="sglang")
    cluster.wait_for_replicas(2)
    assert state()["policy"] == "sglang"
    assert cluster.chat("zeta").status_code == 401
    undisturbed = cluster.chat("acme").json()["choices"][0]["message"]["content"]
    eventually(lambda: cached_tokens() >= 100)
    eventually(lambda: len(processes()[1]) == 2)
    before = processes()
    good = {
        "tenants": [tenant("zeta"), tenant("acme", cache_share=3.0)],
        "policy": "lmetric",
        "public_prompts": [{"name": "pirate", "version": "1", "text": "You are a pirate. " * 40}],
        "default_max_tokens": 4,
    }
    assert stream_beside(good, "lmetric") == undisturbed != ""
    eventually(nobody_is_away)
    assert processes() == before
    assert cached_tokens() >= 100
    question = [{"role": "user", "content": "Count."}]
    answer = cluster.chat("zeta", messages=question, prompt_ref="pirate@1", max_tokens=None)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert state()["notices"]["configuration"] == []

    deploy(**{**good, "tenants": [], "polcy": "sglang"})
    eventually(lambda: len(state()["notices"]["configuration"]) == 3)
    for notice in state()["notices"]["configuration"]:
        assert notice["accepted"] is False and "did you mean policy?" in notice["why"]
    operator = bearer("operator")
    eventually(lambda: metric(cluster.url, "warmpath_refused_configurations_total", headers=operator) == 3)
    assert processes() == before
    assert state()["policy"] == "lmetric"
    assert cluster.chat("zeta", max_tokens=2).status_code == 200

    revoked = {"name": "acme", "key_sha256": [{"sha256": KEYS["acme"][1], "revoked": True}]}
    limited = {**good, "policy": "sglang", "tenants": [revoked, tenant("zeta", tokens_per_minute=500)]}
    assert stream_beside(limited, "sglang") == undisturbed, "a stream that has begun continues"
    eventually(lambda: "revoked" in cluster.chat("acme", max_tokens=2).text)
    eventually(lambda: state()["notices"]["configuration"] == [])
    assert cluster.chat("acme", max_tokens=2).status_code == 401
    too_many = cluster.chat("zeta", max_tokens=400)
    assert (too_many.status_code, too_many.headers["x-ratelimit-limit-tokens"]) == (429, "500")
    assert processes() == before


def dribbled(sock: socket.socket, byte: bytes) -> bytes:
    """Send a byte every half a second until the server answers or ends the connection; return its answer."""
    with suppress(ConnectionError):
        while not select.select([sock], [], [], 0.5)[0]:
            sock.sendall(byte)
        return sock.recv(1000)
    return b""


def slow_headers(sock: socket.socket) -> None:
    sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
    assert dribbled(sock, b"x").startswith(b"HTTP/1.1 408")


def nothing_sent(sock: socket.socket) -> None:
    assert sock.recv(1000).startswith(b"HTTP/1.1 408")
    assert sock.recv(1000) == b""


def slow_body(sock: socket.socket) -> None:
    sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000\r\n\r\n")
    assert dribbled(sock, b" ").startswith(b"HTTP/1.1 408")


def large_body(sock: socket.socket) -> None:
    sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n")
    assert dribbled(sock, b" ").startswith(b"HTTP/1.1 413")
    while dribbled(sock, b" "):  # the answer's other parts; the rest of the body is not waited for
        pass


def endless_body(sock: socket.socket) -> None:
    sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    with suppress(ConnectionError):
        while True:  # the server ends it
            sock.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")


def unread_answers(sock: socket.socket) -> None:
    sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
    poll = select.poll()
    poll.register(sock, 0)
    ((_, event),) = poll.poll(PATIENCE_S * 1000)
    assert event & (select.POLLHUP | select.POLLERR)


def test_an_alert_of_a_real_prometheus_fires_and_clears(cluster: Cluster, tmp_path: Path) -> None:
    """A tenant near its budget raises the alert, a larger budget ends it; vLLM's names come with a live setting.

    docs: monitoring
    """

    def deploy(tokens: int, **live: object) -> None:
        spender = tenant("acme", budget={"tokens": tokens, "hard": False})
        args = {"model": "demo", "engine": "simulated", "replicas": 1, "replica_num_cpus": 0.1}
        keys = [KEYS["operator"][1]]
        cluster.deploy_args(args, {"operator_key_sha256": keys, "tenants": [spender], **live})

    deploy(200)
    cluster.wait_for_replicas(1)
    with prometheus(tmp_path, cluster.url, KEYS["operator"][0]) as server:
        eventually(lambda: bool(server.ask("warmpath_tenant_budget_used_ratio == 0")))
        assert cluster.chat("acme").status_code == 200
        eventually(lambda: [one["tenant"] for one in server.firing("WarmpathBudget")] == ["acme"])
        assert server.ask("vllm:request_success_total") == []
        deploy(1_000_000, vllm_metrics=True)
        eventually(lambda: not server.firing("WarmpathBudget"))
        theirs = 'sum(vllm:request_success_total{model_name="demo",finished_reason="length"}) > 0'
        ours = 'sum(warmpath_requests_finished_total{finished_reason="length"})'  # the warm-up's are among them
        eventually(lambda: bool(server.ask(f"({theirs}) == {ours}")))


@pytest.mark.parametrize(
    "client",
    [slow_headers, nothing_sent, slow_body, large_body, endless_body, unread_answers],
    ids=lambda one: one.__name__,
)
def test_a_client_is_cut_without_warmpath_serve(open_app: Cluster, client: Callable[[socket.socket], None]) -> None:
    """Under `serve deploy`, with the variable of the docs, Ray's own server has the same bounds of slow clients.

    docs: isolation
    """
    address = urlsplit(open_app.url)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(PATIENCE_S)
        sock.connect((address.hostname, address.port))
        client(sock)
    assert HTTP.get(f"{open_app.url}/health").status_code == 200
