"""A cluster of several nodes on this machine, on loopback, for tests and experiments with failures (docs: failures).

Ray runs in a separate process, because Serve reads its environment variables on import and Ray allows one cluster per
process. That process answers commands from a pipe and ends with the pipe.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil

from serve_app.cli.local_ray import answers, held_port, keep_token_private, local_environment, start_patiently
from serve_app.cli.processes import adopt_orphans, end_descendants
from serve_app.cli.supervisor import IDLE_TIMEOUT_S
from serve_app.ray_compat import deploy_config, keep_cluster_unlisted, live_actors

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 180.0
APP_NAME = "warmpath"
HOST = "127.0.0.1"
_SERVE_ACTORS = {"ServeController": "controller", "HAProxyManager": "proxy", "ProxyActor": "fallback"}


class ClusterError(RuntimeError):
    """The cluster failed a command; the message is Serve's own."""


class LocalCluster:
    """Nodes with Serve until ``__exit__``; node 0 is the head, with HAProxy. ``url``: HTTP's, ``address``: Ray's.

    ``gpus``: GPUs of each node. Raises ClusterError if it does not start.
    """

    def __init__(self, nodes: int = 3, *, env: Mapping[str, str] | None = None, gpus: int = 0) -> None:
        self._ending = ExitStack()
        log = tempfile.NamedTemporaryFile("w+", prefix="warmpath-", suffix=".log")  # noqa: SIM115  # stop() closes it
        self._log = self._ending.enter_context(log)
        try:
            port = self._ending.enter_context(held_port())
            self.url = f"http://127.0.0.1:{port}"
            started = get_context("spawn")
            self._pipe, theirs = started.Pipe()
            self._process = started.Process(target=_run, args=(theirs, log.name, dict(env or {}), nodes, gpus, port))
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

    def deploy(
        self, application: Mapping[str, Any], wait_s: float = START_TIMEOUT_S, beside: Mapping[str, Any] | None = None
    ) -> None:
        """Deploy one application of a Serve config file, and, unless ``wait_s`` is 0, wait for its ``/health``.

        ``beside``: another one, with its own name and route_prefix. Raises ClusterError if it is refused, fails or
        takes longer.
        """
        self._ask("deploy", dict(application), *([dict(beside)] if beside is not None else ()))
        deadline_s = time.monotonic() + wait_s
        while wait_s:
            status = self.status()
            if status["status"] == "DEPLOY_FAILED":
                raise ClusterError(f"the deploy failed: {status['message']} {status['deployments']}")
            if status["status"] == "RUNNING" and answers(f"{self.url}/health"):
                return
            if time.monotonic() > deadline_s:
                raise ClusterError(f"the application does not run after {wait_s:.0f} s: {status}")
            time.sleep(0.2)

    def status(self) -> dict[str, Any]:
        """Return the application's ``status`` and ``message`` from Serve, and its ``deployments`` by name."""
        status: dict[str, Any] = self._ask("status")
        return status

    def processes(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return ``kind``, ``name``, ``pid`` and ``node`` (a number) of all processes, or of one kind.

        Kinds: "raylet"; Serve's "controller", "proxy" (starts HAProxy) and "fallback" (answers without an ingress);
        "haproxy"; "Ingress" and "Replica", named by their ids.
        """
        return [process for process in self._ask("processes") if kind in (None, process["kind"])]

    def kill(self, kind: str) -> int:
        """Kill the newest process of a kind with SIGKILL; return its process id."""
        pid = int(self.processes(kind)[-1]["pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_node(self, number: int) -> None:
        """Kill all processes of a node with SIGKILL; the node must not be 0, the head."""
        self._ask("kill_node", number)

    def stop(self) -> None:
        """Let requests and replicas finish, then end every process."""
        self._ending.close()

    def _ask(self, command: str, *arguments: Any) -> Any:
        with suppress(OSError):  # the process has ended, which ``_answer`` reports
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
            os.killpg(self._process.pid, signal.SIGKILL)  # Ray's reaper ends its children
            self._process.join()


def application(
    settings: Mapping[str, Any], deployments: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Return an application for ``deploy``, with Serve's options for deployments by name.

    Ingresses stay on the head: nodes of one machine share its ports, and HAProxy could not distinguish them.
    """
    options = dict(deployments or {})
    on_the_head = {"num_cpus": settings.get("replica_num_cpus", 0.1), "resources": {"node0": 1}}
    options["Ingress"] = {"ray_actor_options": on_the_head, **options.get("Ingress", {})}
    return {"args": dict(settings), "deployments": [{"name": name, **more} for name, more in options.items()]}


class _Raylets:
    """The commands of ``LocalCluster``, in Ray's process."""

    def __init__(self, nodes: int, gpus: int, port: int, run_dir: str) -> None:
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        keep_cluster_unlisted()
        self._run_dir = run_dir
        self._cluster = Cluster()
        # Node N has 1,000 units of the resource "nodeN", which can tie a deployment to it.
        self._nodes = {
            number: self._cluster.add_node(
                num_cpus=16,  # logical CPUs: only the machine limits a node here
                num_gpus=gpus,
                object_store_memory=128 << 20,  # more than the KV in transit between two replicas
                resources={f"node{number}": 1000},
                dashboard_agent_listen_port=None,
                include_dashboard=False,
            )
            for number in range(nodes)
        }
        self.address = str(self._cluster.address)
        ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")
        keep_token_private()
        self._http = {"host": HOST, "port": port, "keep_alive_timeout_s": IDLE_TIMEOUT_S}
        serve.start(http_options=self._http, proxy_location="HeadOnly")

    def kill_node(self, number: int) -> None:
        """Kill all a node's processes with SIGKILL at once, like a failure of its machine."""
        self._cluster.remove_node(self._nodes.pop(number), allow_graceful=False)

    def deploy(self, *applications: dict[str, Any]) -> None:
        """Deploy these applications like ``serve deploy`` with a config file; return before their start."""
        usual = {"name": APP_NAME, "route_prefix": "/", "import_path": "serve_app:build_app"}
        config = {"proxy_location": "HeadOnly", "http_options": self._http}
        deploy_config({**config, "applications": [{**usual, **application} for application in applications]})

    def status(self) -> dict[str, Any]:
        """Return the application's ``status``, ``message``, and ``deployments`` by name."""
        from ray import serve

        nothing = {"status": "NOT_STARTED", "message": "", "deployments": {}}
        status: dict[str, Any] = msgspec.to_builtins(serve.status().applications.get(APP_NAME, nothing))
        return status

    def processes(self) -> list[dict[str, Any]]:
        """Return the rows of ``LocalCluster.processes``."""
        running = [
            ("raylet", f"node{number}", node.all_processes["raylet"][0].process.pid, number)
            for number, node in self._nodes.items()
        ]
        numbers = {node.node_id: number for number, node in self._nodes.items()}
        for actor in live_actors():
            kind, name = _SERVE_ACTORS.get(actor["ActorClassName"]), actor["Name"]
            if name.startswith("SERVE_REPLICA::"):
                _, kind, name = name.removeprefix("SERVE_REPLICA::").split("#")
            place = numbers.get(actor["Address"]["NodeID"])  # None: it died with its node, but Ray has not noticed yet
            if kind is not None and place is not None:
                running.append((kind, name, actor["Pid"], place))
        for process in psutil.process_iter(["name", "cmdline"]):  # in the order of their ids
            arguments = process.info["cmdline"] or ()  # None: it has ended
            if process.info["name"] == "haproxy" and any(a.startswith(f"{self._run_dir}/") for a in arguments):
                running.append(("haproxy", "haproxy", process.pid, 0))
        return [dict(zip(("kind", "name", "pid", "node"), process, strict=True)) for process in running]

    def stop(self) -> None:
        """Let Serve's replicas finish, then end all processes."""
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()


def _run(pipe: Connection, log: str, env: dict[str, str], nodes: int, gpus: int, port: int) -> None:
    """Run a cluster until the pipe ends, with all output in ``log``.

    Sends the address of Ray's head, then each command's result, each with an error message or "".
    """
    os.setsid()  # a terminal's Ctrl-C reaches only the parent, which ends the pipe
    with Path(log).open("ab") as file:
        for output in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), output.fileno())
    # With this, Ray uses loopback as every node's address, and as its own when it connects.
    os.environ.update({**env, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"})
    adopt_orphans()  # a reload while Serve ends can leave an HAProxy behind
    with (
        suppress(EOFError, OSError),  # the parent has closed the pipe
        tempfile.TemporaryDirectory(prefix="warmpath-") as run_dir,
        local_environment(Path(run_dir)),
    ):
        try:
            raylets = start_patiently(partial(_Raylets, nodes, gpus, port, run_dir), lambda: None)
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))
            raise
        try:
            # Ray has its own handler of SIGTERM; this process ends with the pipe instead.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            pipe.send((raylets.address, ""))
            while True:
                command, arguments = pipe.recv()
                try:
                    answer = getattr(raylets, command)(*arguments), ""
                except Exception as error:  # only the caller gets it; the cluster continues
                    answer = None, f"{type(error).__name__}: {error}"
                pipe.send(answer)
        finally:
            raylets.stop()
            end_descendants(os.getpid())
