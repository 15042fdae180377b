"""The process that owns a Ray cluster of several nodes on this machine: raylets, object stores of their own, Serve.

A process of its own, because Serve reads its switches when it is imported, and Ray keeps one cluster a process. Takes
one command a line as JSON on stdin, answers each with one line on stdout; ends when stdin ends. Ports are free ones,
addresses loopback's, and Ray's note of "the latest cluster" of a machine stays as it was.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from serve_app.cli.haproxy import PortBounds
from serve_app.cli.local_ray import keep_token_private, local_environment
from serve_app.ray_compat import deploy_config, keep_cluster_unlisted, live_actors

APP_NAME = "warmpath"
HOST = "127.0.0.1"
NODE_CPUS = 16
"""Logical ones: what limits a node here is the machine, not Ray's accounts."""
_SERVE_ACTORS = {"ServeController": "controller", "HAProxyManager": "proxy", "ProxyActor": "fallback"}


class Raylets:
    """A head, other nodes, and Serve on them; node 0 is the head, with HAProxy. Imports Ray, so make it last."""

    def __init__(self, nodes: int, port: int, object_store_bytes: int, run_dir: Path) -> None:
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        # The cluster is for who has its address: others on this machine go on finding the one that they find now.
        keep_cluster_unlisted()
        self._run_dir = run_dir
        self._port = port
        self._object_store_bytes = object_store_bytes
        self._cluster = Cluster()
        self._nodes: list[Any] = []
        for _ in range(nodes):
            self.add_node()
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")
        keep_token_private()
        serve.start(http_options={"host": HOST, "port": port}, proxy_location="HeadOnly")

    @property
    def address(self) -> str:
        """Where Ray's head listens; for ``ray.init(address=...)``."""
        return str(self._cluster.address)

    def add_node(self) -> int:
        """Start one more node and return its number; 0, the first, is the head.

        Node N has 1,000 of the resource "nodeN", by which a deployment is kept on it, or off others.
        """
        number = len(self._nodes)
        head: dict[str, Any] = {"include_dashboard": False} if not self._nodes else {}
        node = self._cluster.add_node(
            num_cpus=NODE_CPUS,
            object_store_memory=self._object_store_bytes,
            resources={f"node{number}": 1000},
            dashboard_agent_listen_port=None,
            **head,
        )
        self._nodes.append(node)
        return number

    def kill_node(self, number: int) -> None:
        """Kill a node's processes with SIGKILL, all at once, as when its machine fails. The head cannot be killed."""
        if not 0 < number < len(self._nodes) or self._nodes[number] is None:
            raise ValueError(f"there is no node {number} to kill; there are {sorted(self._alive())}, and 0 is the head")
        self._cluster.remove_node(self._nodes[number], allow_graceful=False)
        self._nodes[number] = None

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
            name: {"status": one.status.value, "message": one.message, "replica_states": dict(one.replica_states)}
            for name, one in application.deployments.items()
        }
        return {"status": application.status.value, "message": application.message, "deployments": deployments}

    def processes(self) -> list[dict[str, Any]]:
        """Return what runs now: ``kind``, ``name``, ``pid`` and ``node`` (its number) of each.

        Kinds: "raylet"; Serve's "controller", "proxy" (what starts HAProxy) and "fallback" (answers while no ingress
        does); "haproxy"; and deployments' names, where ``name`` is the id of the replica.
        """
        found: list[dict[str, Any]] = []
        numbers = {self._nodes[number].node_id: number for number in self._alive()}
        for number in self._alive():
            raylet = self._nodes[number].all_processes["raylet"][0].process
            found.append({"kind": "raylet", "name": f"node{number}", "pid": raylet.pid, "node": number})
        for actor in live_actors():
            kind = _SERVE_ACTORS.get(actor["ActorClassName"])
            name = actor["Name"]
            if name.startswith("SERVE_REPLICA::"):
                _, kind, name = name.removeprefix("SERVE_REPLICA::").split("#")
            if kind is not None:
                node = numbers.get(actor["Address"]["NodeID"])
                if node is not None:  # else it died with its node, and Ray has yet to notice
                    found.append({"kind": kind, "name": name, "pid": actor["Pid"], "node": node})
        found += ({"kind": "haproxy", "name": "haproxy", "pid": pid, "node": 0} for pid in _haproxies(self._run_dir))
        return found

    def stop(self) -> None:
        """Let Serve's replicas finish, then end all processes."""
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()

    def _alive(self) -> list[int]:
        return [number for number, node in enumerate(self._nodes) if node is not None]


def _haproxies(run_dir: Path) -> Iterator[int]:
    """Yield the running HAProxy processes of this instance; those that drain after a reload too, the newest last."""
    noted = run_dir / "haproxy.pids"
    for line in dict.fromkeys(noted.read_text().split() if noted.exists() else ()):
        with suppress(OSError):
            if str(run_dir).encode() in Path(f"/proc/{line}/cmdline").read_bytes():
                yield int(line)


def main() -> None:
    """Run the cluster that the first argument describes (JSON: nodes, port, object_store_bytes), until stdin ends."""
    options = json.loads(sys.argv[1])
    # Ray then takes loopback for every node's address, and for its own when it connects.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    with _answers() as answers, local_environment(bounds=PortBounds(options.pop("max_connections"))) as run_dir:
        try:
            raylets = Raylets(**options, run_dir=run_dir)
        except Exception as error:
            _say(answers, {"error": f"{type(error).__name__}: {error}"})
            raise
        try:
            # Ray takes SIGTERM for itself; what ends this process is the end of its input.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _say(answers, {"result": raylets.address})
            _serve_commands(raylets, answers)
        finally:
            raylets.stop()


def _serve_commands(raylets: Raylets, answers: TextIO) -> None:
    commands: dict[str, Callable[..., Any]] = {
        command.__name__: command
        for command in (raylets.add_node, raylets.kill_node, raylets.deploy, raylets.status, raylets.processes)
    }
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            _say(answers, {"result": commands[asked["command"]](*asked["arguments"])})
        except Exception as error:  # whoever asked has it, with the rest of the cluster unharmed
            _say(answers, {"error": f"{type(error).__name__}: {error}"})


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # nobody asks any more: stdin ends next
        print(json.dumps(answer), file=answers, flush=True)


@contextmanager
def _answers() -> Iterator[TextIO]:
    """Yield what stdout was; whatever else this process and its children print goes to stderr."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        yield answers


if __name__ == "__main__":
    main()
