"""The process that owns a Ray cluster of several nodes on this machine: raylets, object stores of their own, Serve.

A process of its own, because Serve reads its switches when it is imported, and Ray keeps one cluster a process. Takes
commands from a pipe, answers each, and ends with the pipe. Ports are free ones, addresses loopback's, and Ray's note of
"the latest cluster" of a machine stays as it was.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serve_app.cli.haproxy import running_haproxies
from serve_app.cli.local_ray import keep_token_private, local_environment
from serve_app.ray_compat import deploy_config, keep_cluster_unlisted, live_actors

APP_NAME = "warmpath"
HOST = "127.0.0.1"
NODE_CPUS = 16
"""Logical ones: what limits a node here is the machine, not Ray's accounts."""
OBJECT_STORE_BYTES = 128 << 20
"""Of each node: more than the KV that is on its way between two replicas."""
_SERVE_ACTORS = {"ServeController": "controller", "HAProxyManager": "proxy", "ProxyActor": "fallback"}


class Raylets:
    """A head, other nodes, and Serve on them; node 0 is the head, with HAProxy. Imports Ray, so make it last."""

    def __init__(self, nodes: int, port: int, run_dir: Path) -> None:
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        # The cluster is for who has its address: others on this machine go on finding the one that they find now.
        keep_cluster_unlisted()
        self._run_dir = run_dir
        self._port = port
        self._cluster = Cluster()
        self._nodes = {number: self._add_node(number) for number in range(nodes)}
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")
        keep_token_private()
        serve.start(http_options={"host": HOST, "port": port}, proxy_location="HeadOnly")

    @property
    def address(self) -> str:
        """Where Ray's head listens; for ``ray.init(address=...)``."""
        return str(self._cluster.address)

    def _add_node(self, number: int) -> Any:
        """Start one more node; the first is the head.

        Node N has 1,000 of the resource "nodeN", by which a deployment is kept on it, or off others.
        """
        head: dict[str, Any] = {} if number else {"include_dashboard": False}
        return self._cluster.add_node(
            num_cpus=NODE_CPUS,
            object_store_memory=OBJECT_STORE_BYTES,
            resources={f"node{number}": 1000},
            dashboard_agent_listen_port=None,
            **head,
        )

    def kill_node(self, number: int) -> None:
        """Kill a node's processes with SIGKILL, all at once, as when its machine fails. The head cannot be killed."""
        if number == 0 or number not in self._nodes:
            raise ValueError(f"there is no node {number} to kill; there are {sorted(self._nodes)}, and 0 is the head")
        self._cluster.remove_node(self._nodes.pop(number), allow_graceful=False)

    def deploy(self, application: dict[str, Any]) -> None:
        """Do what ``serve deploy`` does with a config file of this one application; returns before it has started.

        Raises what Serve raises for a wrong config.
        """
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": HOST, "port": self._port},
            "applications": [
                {"name": APP_NAME, "route_prefix": "/", "import_path": "serve_app.app:build_app", **application}
            ],
        }
        deploy_config(config)

    def status(self) -> dict[str, Any]:
        """Return Serve's words for the application: ``status``, ``message``, and ``deployments`` by name."""
        from ray import serve

        application = serve.status().applications.get(APP_NAME)
        if application is None:
            return {"status": "NOT_STARTED", "message": "", "deployments": {}}
        deployments = {
            name: {
                "status": deployment.status.value,
                "message": deployment.message,
                "replica_states": dict(deployment.replica_states),
            }
            for name, deployment in application.deployments.items()
        }
        return {"status": application.status.value, "message": application.message, "deployments": deployments}

    def processes(self) -> list[dict[str, Any]]:
        """Return what runs now, as ``LocalCluster.processes`` does."""
        running: list[dict[str, Any]] = []
        numbers = {node.node_id: number for number, node in self._nodes.items()}
        for number, node in self._nodes.items():
            raylet = node.all_processes["raylet"][0].process
            running.append({"kind": "raylet", "name": f"node{number}", "pid": raylet.pid, "node": number})
        for actor in live_actors():
            kind = _SERVE_ACTORS.get(actor["ActorClassName"])
            name = actor["Name"]
            if name.startswith("SERVE_REPLICA::"):
                _, kind, name = name.removeprefix("SERVE_REPLICA::").split("#")
            place = numbers.get(actor["Address"]["NodeID"])  # None: it died with its node, and Ray has yet to notice
            if kind is not None and place is not None:
                running.append({"kind": kind, "name": name, "pid": actor["Pid"], "node": place})
        haproxies = running_haproxies(self._run_dir)
        running += [{"kind": "haproxy", "name": "haproxy", "pid": haproxy.pid, "node": 0} for haproxy in haproxies]
        return running

    def stop(self) -> None:
        """Let Serve's replicas finish, then end all processes."""
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()


def run(pipe: Connection, log: str, env: dict[str, str], nodes: int, port: int) -> None:
    """Run a cluster until the pipe ends; what this process and its children print goes to ``log``.

    Sends the address of Ray's head, then for each command, a name and arguments, its result; with each an error's
    message, "" where there is none.
    """
    os.setsid()  # a Ctrl-C at the terminal is for who has started this: it ends the pipe
    with Path(log).open("ab") as file:
        for output in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), output.fileno())
    # Ray then takes loopback for every node's address, and for its own when it connects.
    os.environ.update({**env, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"})
    with suppress(EOFError, OSError), local_environment() as run_dir:  # nobody asks any more
        try:
            raylets = Raylets(nodes, port, run_dir)
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))
            raise
        try:
            # Ray takes SIGTERM for itself; what ends this process is the end of the pipe.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            pipe.send((raylets.address, ""))
            while True:
                pipe.send(_answer(raylets, *pipe.recv()))
        finally:
            raylets.stop()


def _answer(raylets: Raylets, command: str, arguments: tuple[Any, ...]) -> tuple[Any, str]:
    try:
        return getattr(raylets, command)(*arguments), ""
    except Exception as error:  # whoever asked has it, with the rest of the cluster unharmed
        return None, f"{type(error).__name__}: {error}"
