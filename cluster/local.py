"""A cluster of several nodes on this machine: `python -m cluster.local --nodes 3`, and `LocalCluster` for tests.

Knows nothing of Ray: `cluster.raylets` runs it in a process of its own. Everything it starts it stops.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.console import Console

from cluster.raylets import run
from serve_app.cli.local_ray import answers, held_port

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 180.0

console = Console(stderr=True, highlight=False)


class ClusterError(RuntimeError):
    """The cluster did not do what it was told; the message has Serve's own words."""


class LocalCluster:
    """A head and ``nodes`` - 1 other nodes with Serve, from ``__enter__`` to ``__exit__``.

    ``port``: of HTTP, a free one by default. ``env``: of all that is started. Node 0 is the head; it has HAProxy.
    Raises ClusterError when it does not come up.
    """

    def __init__(self, nodes: int = 3, *, port: int | None = None, env: Mapping[str, str] | None = None) -> None:
        self._ending = ExitStack()
        log = tempfile.NamedTemporaryFile("w+", prefix="warmpath-", suffix=".log")  # noqa: SIM115  # stop() closes it
        self._log = self._ending.enter_context(log)
        try:
            self.port = port if port is not None else self._ending.enter_context(held_port())
            self.url = f"http://127.0.0.1:{self.port}"
            started = get_context("spawn")
            self._pipe, theirs = started.Pipe()
            self._process = started.Process(target=run, args=(theirs, log.name, dict(env or {}), nodes, self.port))
            self._process.start()
            theirs.close()
            self._ending.callback(self._end)
            self.address: str = self._answer()
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
            if status["status"] == "RUNNING" and answers(f"{self.url}/health"):
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
        return [process for process in self._ask("processes") if kind in (None, process["kind"])]

    def kill(self, kind: str, name: str | None = None) -> int:
        """Kill the newest process of a kind, or the one of that name, with SIGKILL; returns its process id."""
        named = [process for process in self.processes(kind) if name in (None, process["name"])]
        if not named:
            raise ClusterError(f"there is no {kind} {name or ''} to kill")
        pid = int(named[-1]["pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_node(self, number: int) -> None:
        """Kill a node and all that runs on it with SIGKILL; not the head, which is node 0."""
        self._ask("kill_node", number)

    def stop(self) -> None:
        """Let requests and replicas finish, then end every process; once is enough."""
        self._ending.close()

    def _ask(self, command: str, *arguments: Any) -> Any:
        with suppress(OSError):  # it has ended; that is seen where it is heard
            self._pipe.send((command, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv() if self._pipe.poll(START_TIMEOUT_S) else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            raise ClusterError(f"the cluster's process has ended or hangs:\n{Path(self._log.name).read_text()[-3000:]}")
        result, error = answer
        if error:
            raise ClusterError(error)
        return result

    def _end(self) -> None:
        self._pipe.close()
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive() and self._process.pid is not None:
            os.killpg(self._process.pid, signal.SIGKILL)  # Ray's reaper ends what the process had started
            self._process.join()


def application(
    settings: Mapping[str, Any], deployments: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Return an application for ``deploy``: ``settings`` as ``args``, and Serve's options of deployments by name.

    Ingresses are kept on the head: nodes of one machine share its ports, and HAProxy could not tell two of them apart.
    """
    options = dict(deployments or {})
    on_the_head = {"num_cpus": settings.get("replica_num_cpus", 0.1), "resources": {"node0": 1}}
    options["Ingress"] = {"ray_actor_options": on_the_head, **options.get("Ingress", {})}
    return {"args": dict(settings), "deployments": [{"name": name, **more} for name, more in options.items()]}


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def local(
    nodes: Annotated[int, typer.Option(help="nodes, the head among them", min=1)] = 3,
    replicas: Annotated[int, typer.Option(help="engine replicas", min=1)] = 3,
    port: Annotated[int | None, typer.Option(help="HTTP port; a free one by default")] = None,
) -> None:
    """Start a Ray cluster of several nodes on this machine, deploy simulated engines, serve until Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    settings = {"model": "demo", "engine": "simulated", "replicas": replicas}
    try:
        with console.status(f"[1/2] {nodes} nodes: starting"):
            cluster = LocalCluster(nodes, port=port)
        console.print(f"[1/2] {nodes} nodes: started")
        with cluster:
            with console.status("[2/2] the application: starting"):
                cluster.deploy(application(settings))
            console.print("[2/2] the application: started")
            _greet(cluster)
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


def _greet(cluster: LocalCluster) -> None:
    print(f"{cluster.url}   (engine: simulated: tokens are made up, and times come from a cost model)")
    print(f"Ray: {cluster.address}")
    for process in sorted(cluster.processes(), key=lambda process: (process["node"], process["kind"])):
        print(f"  node {process['node']}  pid {process['pid']:<8} {process['kind']:<10} {process['name']}")
    body = json.dumps({"model": "demo", "prompt": "Hello", "max_tokens": 16})
    print(f"curl {cluster.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)


if __name__ == "__main__":
    app()
