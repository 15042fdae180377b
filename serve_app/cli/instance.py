"""An instance's own process: the model is found, Ray and Serve start, requests are served until it is told to stop.

Started by ``supervisor``, it tells of its progress in events on stdout, takes orders on stdin, and ends with it: when
stdin ends, so does everything that it has started.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, TextIO

from serve_app.checkpoints.checkpoint import CheckpointError
from serve_app.checkpoints.sources.resolve import with_local_model
from serve_app.cli.greeting import greeting
from serve_app.cli.haproxy import PortBounds
from serve_app.cli.local_ray import keep_token_private, local_environment
from serve_app.cli.preflight import problems
from serve_app.cli.processes import end_descendants
from serve_app.cli.start_failure import StartFailed, innermost, wait_until_running
from serve_app.cli.supervisor import Launch
from serve_app.config.app import AppConfig
from serve_app.ray_compat import NODE_TOO_SLOW, use_outside_of_replicas

APP_NAME = "warmpath"
HEALTHY_WITHIN_S = 300.0


class Reporter:
    """Tells the supervisor, and so the user, what happens. See ``supervisor.Event`` for the kinds."""

    def __init__(self, events: TextIO) -> None:
        self._events = events

    def say(self, kind: str, text: str) -> None:
        """Send one event."""
        print(json.dumps([kind, text]), file=self._events, flush=True)


def main() -> None:
    """Run the instance that the first line on stdin describes, until a second line says to stop."""
    orders = FileIO(sys.stdin.fileno(), closefd=False)
    launch = Launch(**json.loads(orders.readline()))
    stop = threading.Event()
    threading.Thread(target=_take_orders, args=(orders, launch.run_dir, stop), daemon=True).start()
    with _events() as events:
        reporter = Reporter(events)
        try:
            reporter.say("begun", "")  # from here on an interrupt is an end without a word
            settings = _usable(AppConfig.model_validate(launch.settings), reporter)
            if settings is not None:
                if not launch.verbose:
                    _write_to(launch.log)
                _serve(settings, launch, reporter, stop)
        except KeyboardInterrupt:
            return  # the start is given up: what was half made of a model is gone
        except StartFailed as error:
            reporter.say("failed", str(error))
        except Exception as error:
            if not launch.verbose:
                _write_to(launch.log)
            traceback.print_exc()
            reporter.say("failed", innermost(f"{type(error).__name__}: {error}"))


def _take_orders(orders: FileIO, run_dir: str, stop: threading.Event) -> None:
    if orders.readline():
        stop.set()
        orders.readline()
    # Nobody is there to end what this process has started, if it does not do so now.
    end_descendants(os.getpid())
    shutil.rmtree(run_dir, ignore_errors=True)
    os._exit(1)


@contextmanager
def _events() -> Iterator[TextIO]:
    """Yield what stdout was; whatever else this process and its children print goes to stderr."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as events:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        yield events


def _usable(settings: AppConfig, reporter: Reporter) -> AppConfig | None:
    """Find, fetch or build the model, and return the settings with it; None where they cannot be used, which is said.

    What fetches tells of it on stderr, which is the user's until Ray starts.
    """
    try:
        settings = with_local_model(settings, lambda text: reporter.say("done", text))
    except CheckpointError as error:
        reporter.say("refused", str(error))
        return None
    found = problems(settings)
    for problem in found.sentences:
        reporter.say("refused", problem)
    if found.sentences:
        return None
    reporter.say("done", f"[1/4] model {settings.model}: {found.model}")
    return settings


def _write_to(log: str) -> None:
    """Send to a file what this process and its children print from now on."""
    with Path(log).open("ab") as file:
        for output in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), output.fileno())


def _serve(settings: AppConfig, launch: Launch, reporter: Reporter, stop: threading.Event) -> None:
    bounds = PortBounds(launch.max_connections_per_address)
    with local_environment(use_haproxy=launch.haproxy, bounds=bounds, run_dir=Path(launch.run_dir)):
        started_s = time.monotonic()
        reporter.say("doing", "[2/4] Ray: starting")
        logs = _start_ray(settings, launch.verbose, reporter)
        import ray
        from ray import serve as ray_serve

        from serve_app.app import build_app

        # Ray takes SIGTERM for itself, and leaves at once; what ends this process is an order.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        reporter.say("done", "[2/4] Ray: started")
        replicas = f"[3/4] {settings.first_replicas} replicas and the ingress"
        reporter.say("doing", f"{replicas}: starting")
        ray_serve.start(http_options={"host": launch.host, "port": launch.port}, proxy_location="HeadOnly")
        target = ray_serve.RunTarget(build_app(settings), name=APP_NAME, route_prefix="/")
        ray_serve.run_many([target], wait_for_applications_running=False)
        wait_until_running(APP_NAME, logs)
        reporter.say("done", f"{replicas}: started")
        reporter.say("doing", "[4/4] waiting for /health")
        _wait_healthy(f"http://{'127.0.0.1' if launch.host == '0.0.0.0' else launch.host}:{launch.port}/health", logs)
        reporter.say("done", f"[4/4] ready after {time.monotonic() - started_s:.0f} s; logs: {logs}")
        reporter.say("serving", greeting(settings, launch.host, launch.port))
        stop.wait()
        _drain(settings.shutdown_timeout_s, reporter)
        ray_serve.shutdown()
        ray.shutdown()


def _start_ray(settings: AppConfig, verbose: bool, reporter: Reporter) -> Path:
    """Start Ray on this machine, at the second try if need be; return where its processes and Serve's write logs."""
    import ray

    level = logging.INFO if verbose else logging.ERROR
    logging.getLogger("ray").setLevel(level)
    logging.getLogger("ray.serve").setLevel(level)
    needed = (settings.most_replicas + settings.ingress_replicas) * max(settings.replica_num_cpus, 0.1)
    init = partial(
        ray.init,
        address="local",
        num_cpus=max(os.cpu_count() or 1, int(needed) + 1),
        include_dashboard=False,
        log_to_driver=verbose,
        logging_level=level,
        configure_logging=False,
    )
    try:
        context = init()
    except Exception as error:
        if NODE_TOO_SLOW not in str(error):
            raise
        reporter.say("done", "[2/4] Ray was not up in the 30 s that it gives itself (a busy machine?): once more")
        ray.shutdown()
        end_descendants(os.getpid())  # what the first try has started goes on otherwise
        context = init()
    keep_token_private()
    gpus, wanted = ray.cluster_resources().get("GPU", 0), settings.first_replicas * settings.replica_num_gpus
    if wanted > gpus:
        raise StartFailed(f"{settings.first_replicas} replicas need {wanted:g} GPUs, and Ray finds {gpus:g} here")
    return Path(context.address_info["session_dir"]) / "logs" / "serve"


def _drain(timeout_s: float, reporter: Reporter) -> None:
    """Let every ingress finish what it answers. Never raises: a stop goes on."""
    from ray import serve as ray_serve

    try:
        handle = ray_serve.get_app_handle(APP_NAME)
        use_outside_of_replicas(handle)
        stopped: list[Any] = handle.broadcast("stop", timeout_s).results(timeout_s=timeout_s + 30)
        ended = sum(stopped)
        if ended:
            reporter.say("done", f"{ended} answers were not whole after {timeout_s:g} s, and ended with an error")
    except Exception:
        traceback.print_exc()
        reporter.say("done", "an ingress could not be told to stop; its answers end as they are")


def _wait_healthy(url: str, logs: Path) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy leads to this machine's loopback
    deadline_s = time.monotonic() + HEALTHY_WITHIN_S
    while time.monotonic() < deadline_s:
        try:
            with direct.open(url, timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    raise StartFailed(f"{url} did not answer within {HEALTHY_WITHIN_S:.0f} s; the logs of Serve are in {logs}")
