"""A cluster of several nodes on this machine: `python -m cluster.local --nodes 3`, and `LocalCluster` for tests.

Knows nothing of Ray: `cluster.raylets` runs it in a process of its own. Everything it starts it stops.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, Self

import httpx
import typer
import yaml
from rich.console import Console

from serve_app.cli.haproxy import MAX_CONNECTIONS_PER_ADDRESS
from serve_app.cli.local_ray import held_port
from serve_app.config.app import AppConfig

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 180.0
OBJECT_STORE_BYTES = 128 << 20
"""Of each node: more than the KV that is on its way between two replicas."""

console = Console(stderr=True, highlight=False)


class ClusterError(RuntimeError):
    """The cluster did not do what it was told; the message has Serve's own words."""


class LocalCluster:
    """A head and ``nodes`` - 1 other nodes with Serve, from ``__enter__`` to ``__exit__``.

    ``port``: of HTTP, a free one by default. Node 0 is the head; it has HAProxy. Raises ClusterError when it does not
    come up.
    """

    def __init__(
        self,
        nodes: int = 3,
        *,
        port: int | None = None,
        object_store_bytes: int = OBJECT_STORE_BYTES,
        max_connections: int = MAX_CONNECTIONS_PER_ADDRESS,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._ending = ExitStack()
        log = tempfile.NamedTemporaryFile("w+", prefix="warmpath-", suffix=".log")  # noqa: SIM115  # stop() closes it
        self._log = self._ending.enter_context(log)
        try:
            self.port = port if port is not None else self._ending.enter_context(held_port())
            self.url = f"http://127.0.0.1:{self.port}"
            options = {
                "nodes": nodes,
                "port": self.port,
                "object_store_bytes": object_store_bytes,
                "max_connections": max_connections,
            }
            self._process = subprocess.Popen(  # noqa: S603  # our own module
                [sys.executable, "-m", "cluster.raylets", json.dumps(options)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
                # A Ctrl-C at the terminal is for us: we then end this one in order.
                start_new_session=True, env={**os.environ, **(env or {})},
            )  # fmt: skip
            self._ending.callback(self._end)
            self.address: str = self._answer(START_TIMEOUT_S)
        except BaseException:
            self._ending.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def deploy(self, application: Mapping[str, Any], wait_s: float = START_TIMEOUT_S) -> None:
        """Deploy one application of a Serve config file (``args``, ``deployments``; ``name`` and the like are set).

        Waits until it runs and answers ``/health``; ``wait_s`` 0 returns at once. Raises ClusterError when it is
        refused or fails.
        """
        self._ask("deploy", dict(application))
        if wait_s:
            self.wait_until_running(wait_s)

    def wait_until_running(self, wait_s: float = START_TIMEOUT_S) -> None:
        """Wait until the last deploy is done and HTTP answers. Raises ClusterError when it failed or took longer."""
        deadline_s = time.monotonic() + wait_s
        while True:
            status = self.status()
            if status["status"] == "DEPLOY_FAILED":
                raise ClusterError(f"the deploy failed: {status['message']} {status['deployments']}")
            if status["status"] == "RUNNING" and _answers(f"{self.url}/health"):
                return
            if time.monotonic() > deadline_s:
                raise ClusterError(f"the application does not run after {wait_s:.0f} s: {status}")
            time.sleep(0.2)

    def status(self) -> dict[str, Any]:
        """Return Serve's ``status`` and ``message`` of the application, and its ``deployments`` by name."""
        status: dict[str, Any] = self._ask("status")
        return status

    def processes(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return ``kind``, ``name``, ``pid`` and ``node`` (its number) of what runs, all or of one kind.

        Kinds: "raylet"; Serve's "controller", "proxy" (what starts HAProxy) and "fallback" (answers while no ingress
        does); "haproxy"; "Ingress" and "Replica", whose names are their ids.
        """
        return [one for one in self._ask("processes") if kind in (None, one["kind"])]

    def kill(self, kind: str, name: str | None = None) -> int:
        """Kill the newest process of a kind, or the one of that name, with SIGKILL; returns its process id."""
        found = [one for one in self.processes(kind) if name in (None, one["name"])]
        if not found:
            raise ClusterError(f"there is no {kind} {name or ''} to kill")
        pid = int(found[-1]["pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    def add_node(self) -> int:
        """Start one more node; returns its number."""
        return int(self._ask("add_node"))

    def kill_node(self, number: int) -> None:
        """Kill a node and all that runs on it with SIGKILL; not the head, which is node 0."""
        self._ask("kill_node", number)

    def stop(self) -> None:
        """Let requests and replicas finish, then end every process; once is enough."""
        self._ending.close()

    def _ask(self, command: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            print(json.dumps({"command": command, "arguments": arguments}), file=self._process.stdin, flush=True)
        except OSError as error:
            raise ClusterError(f"the cluster's process has ended:\n{self._log_end()}") from error
        return self._answer(START_TIMEOUT_S)

    def _answer(self, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(timeout_s) else ""
        if not line:
            raise ClusterError(f"the cluster's process has ended or hangs:\n{self._log_end()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ClusterError(answer["error"])
        return answer["result"]

    def _log_end(self) -> str:
        return Path(self._log.name).read_text()[-3000:]

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # Ray's reaper ends what the process had started
            self._process.wait()


def application(
    settings: Mapping[str, Any], deployments: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Return an application for ``deploy``: ``settings`` as ``args``, and Serve's options of deployments by name.

    Ingresses are kept on the head: nodes of one machine share its ports, and HAProxy could not tell two of them apart.
    """
    num_cpus = settings.get("replica_num_cpus", 0.1)
    options: dict[str, dict[str, Any]] = {
        "Ingress": {"ray_actor_options": {"num_cpus": num_cpus, "resources": {"node0": 1}}}
    }
    for name, more in (deployments or {}).items():
        options[name] = {**options.get(name, {}), **more}
    return {"args": dict(settings), "deployments": [{"name": name, **more} for name, more in options.items()]}


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def local(
    nodes: Annotated[int, typer.Option(help="nodes, the head among them", min=1)] = 3,
    replicas: Annotated[int, typer.Option(help="engine replicas of the default application", min=1)] = 3,
    port: Annotated[int | None, typer.Option(help="HTTP port; a free one by default")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Serve config file whose application is deployed; default: simulated engines")
    ] = None,
) -> None:
    """Start a Ray cluster of several nodes on this machine, deploy warmpath, serve until Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    if config is None:
        wanted = application({"model": "demo", "engine": "simulated", "replicas": replicas})
    else:
        applications = (yaml.safe_load(config.read_text()) or {}).get("applications")
        if not applications:
            raise typer.BadParameter(f"{config} names no applications", param_hint="--config")
        wanted = application(applications[0].get("args") or {}, _options(applications[0]))
    try:
        with console.status(f"[1/2] {nodes} nodes: starting"):
            cluster = LocalCluster(nodes, port=port)
        console.print(f"[1/2] {nodes} nodes: started")
        with cluster:
            with console.status("[2/2] the application: starting"):
                cluster.deploy(wanted)
            console.print("[2/2] the application: started")
            _greet(cluster, wanted["args"])
            with suppress(KeyboardInterrupt):
                signal.pause()
            with console.status("stopping"):
                cluster.stop()
    except ClusterError as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        pass  # while it started: what was there is stopped by now
    console.print("stopped")


def _options(application: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found = application.get("deployments") or []
    return {one["name"]: {name: value for name, value in one.items() if name != "name"} for one in found}


def _greet(cluster: LocalCluster, settings: Mapping[str, Any]) -> None:
    config = AppConfig.model_validate(settings)
    made_up = ": tokens are made up, and times come from a cost model" if config.engine_traits.simulated else ""
    print(f"{cluster.url}   (engine: {config.engine}{made_up})\nRay: {cluster.address}")
    for one in sorted(cluster.processes(), key=lambda one: (one["node"], one["kind"])):
        print(f"  node {one['node']}  pid {one['pid']:<8} {one['kind']:<10} {one['name']}")
    body = json.dumps({"model": config.model_name, "prompt": "Hello", "max_tokens": 16})
    print(f"curl {cluster.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)


if __name__ == "__main__":
    app()
