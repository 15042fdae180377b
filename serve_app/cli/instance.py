"""An instance's process: starts Ray and Serve, reads orders from its stdin, a socket, and ends with that socket."""

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TextIO

import httpx
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from serve_app.checkpoints.demo_model import RECIPES
from serve_app.checkpoints.sources import SMOLLM2
from serve_app.cli.draining import drain
from serve_app.cli.local_ray import answers, keep_token_private, local_environment, start_patiently
from serve_app.cli.processes import end_descendants
from serve_app.cli.supervisor import Launch
from serve_app.config.app import AppConfig, deployment_of
from serve_app.errors import Overloaded, innermost

APP_NAME = "warmpath"
HEALTHY_WITHIN_S = 300.0


class StartFailed(Exception):
    """The instance cannot start; the message is for the user."""


def main() -> None:
    """Run the instance of the socket's first line until the second. Exits with 1 for faults."""
    channel = FileIO(os.dup(sys.stdin.fileno()), "r+")
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())  # child processes would keep the socket open
    launch = Launch(**json.loads(channel.readline()))
    stop = threading.Event()
    threading.Thread(target=_take_orders, args=(channel, launch.run_dir, stop), daemon=True).start()
    terminal, output = _kept(sys.stderr), _kept(sys.stdout)
    console = Console(file=terminal, highlight=False, markup=False, emoji=False, soft_wrap=True)
    try:
        settings = AppConfig.model_validate(launch.settings)
        if not launch.verbose:
            _write_to(launch.log)
        with _serving(settings, launch, console):
            channel.write(b"serving\n")  # before the user reads the greeting, and may stop the instance
            print(greeting(settings, launch.url, refusal_without_key(launch.url)), file=output, flush=True)
            stop.wait()
            drain((APP_NAME,), settings.shutdown_timeout_s, console)
    except StartFailed as error:
        console.print(f"error: {error}", style="red")
        sys.exit(1)
    except Exception as error:
        if not launch.verbose:
            _write_to(launch.log)
        traceback.print_exc()
        console.print("error:", innermost(f"{type(error).__name__}: {error}"), style="red")
        sys.exit(1)


def _take_orders(channel: FileIO, run_dir: str, stop: threading.Event) -> None:
    if channel.readline():
        stop.set()
        channel.readline()
    # No other process would end this one's children.
    end_descendants(os.getpid())
    shutil.rmtree(run_dir, ignore_errors=True)
    os._exit(1)


def _kept(stream: TextIO) -> TextIO:
    """Return a copy of a stream that no other process inherits."""
    return os.fdopen(os.dup(stream.fileno()), "w")


def _write_to(log: str) -> None:
    """Redirect the output of this process and its children to a file."""
    with Path(log).open("ab") as file:
        for output in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), output.fileno())


@contextmanager
def _elapsed(console: Console, words: str) -> Iterator[None]:
    """Show a terminal what is waited for, and for how long already."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(words)
        yield


@contextmanager
def _step(console: Console, subject: str) -> Iterator[None]:
    begun_s = time.monotonic()
    with _elapsed(console, f"{subject}: starting"):
        yield
    console.print(f"{subject}: started in {time.monotonic() - begun_s:.0f} s")


@contextmanager
def _serving(settings: AppConfig, launch: Launch, console: Console) -> Iterator[None]:
    """Start Ray and the application, and end both. Raises StartFailed."""
    run_dir, connections, started_s = Path(launch.run_dir), launch.max_connections_per_address, time.monotonic()
    with local_environment(run_dir, connections, use_haproxy=launch.haproxy):
        with _step(console, "[2/4] Ray"):
            logs = _start_ray(settings, launch.verbose, console)
        import ray
        from ray import serve as ray_serve

        from serve_app.app import build_app

        # Ray's own handler of SIGTERM exits at once; this process ends by an order instead.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        served = settings.served()
        first = sum(one.first_replicas for one in served.values())
        with _step(console, f"[3/4] {first} replicas and the ingress"):
            http = {"host": launch.host, "port": launch.port, "keep_alive_timeout_s": launch.keep_alive_timeout_s}
            ray_serve.start(http_options=http, proxy_location="HeadOnly")
            target = ray_serve.RunTarget(build_app(settings), name=APP_NAME, route_prefix="/")
            ray_serve.run_many([target], wait_for_applications_running=False)
            for name, why in _wait_until_running(served, settings, logs).items():
                console.print(f"{name} does not start, and the others are served: {why}", style="red")
        with _elapsed(console, "[4/4] waiting for /health"):
            _wait_healthy(f"{launch.url}/health", logs)
        console.print(f"[4/4] ready after {time.monotonic() - started_s:.0f} s; logs: {logs}")
        yield
        ray_serve.shutdown()
        ray.shutdown()


def _start_ray(settings: AppConfig, verbose: bool, console: Console) -> Path:
    """Start Ray on this machine; return the folder of Serve's logs."""
    import ray

    level = logging.INFO if verbose else logging.ERROR
    logging.getLogger("ray").setLevel(level)
    logging.getLogger("ray.serve").setLevel(level)
    served = settings.served().values()
    needed = sum(one.most_replicas * max(one.replica_num_cpus, 0.1) for one in served)
    needed += settings.ingress_replicas * max(settings.replica_num_cpus, 0.1)
    init = partial(
        ray.init,
        address="local",
        num_cpus=max(os.cpu_count() or 1, int(needed) + 1),
        include_dashboard=False,
        log_to_driver=verbose,
        logging_level=level,
        configure_logging=False,
    )

    def again() -> None:
        console.print("Ray did not start within its limit of 30 s (a busy machine?): trying again")
        ray.shutdown()

    context = start_patiently(init, again)
    keep_token_private()
    gpus = ray.cluster_resources().get("GPU", 0)
    needed_gpus = sum(one.first_replicas * one.replica_num_gpus for one in served)
    if needed_gpus > gpus:
        first = sum(one.first_replicas for one in served)
        raise StartFailed(f"{first} replicas need {needed_gpus:g} GPUs, and Ray finds {gpus:g} here")
    return Path(context.address_info["session_dir"]) / "logs" / "serve"


def _wait_until_running(served: Mapping[str, AppConfig], settings: AppConfig, logs: Path) -> dict[str, str]:
    """Return when the application runs, with the reasons of models that do not start, by name.

    Raises StartFailed if none does: at a constructor's first failure; Serve would retry.
    """
    from ray import serve as ray_serve

    models = {deployment_of(name, settings): name for name in served}
    while True:
        status = ray_serve.status().applications[APP_NAME]
        if status.status == "RUNNING":
            return {}
        deployments = status.deployments
        messages = {name: deployment.message for name, deployment in deployments.items()}
        failed = {name: why for name in models if (why := failure("", {name: messages.get(name, "")}, ""))}
        others = {name for name in deployments if name not in failed}
        why = failure(status.status, messages, status.message)
        if why and (not failed or len(failed) == len(models)):
            raise StartFailed(f"{why}\nlogs of Serve: {logs}")
        if failed and all(deployments[name].status == "HEALTHY" for name in others):
            return {models[name]: why.partition(": ")[2] for name, why in failed.items()}
        time.sleep(0.2)


def failure(status: str, deployments: Mapping[str, str], message: str) -> str | None:
    """Return the reason of a start's failure; None while it may succeed."""
    for name, text in deployments.items():
        if "Traceback (most recent call last)" in text:
            return f"{name} does not start: {innermost(text)}"
    if status == "DEPLOY_FAILED":
        return innermost(next(filter(None, deployments.values()), message))
    return None


def _wait_healthy(url: str, logs: Path) -> None:
    deadline_s = time.monotonic() + HEALTHY_WITHIN_S
    while time.monotonic() < deadline_s:
        if answers(url):
            return
        time.sleep(0.2)
    raise StartFailed(f"{url} did not answer within {HEALTHY_WITHIN_S:.0f} s; the logs of Serve are in {logs}")


def refusal_without_key(url: str) -> tuple[int, str]:
    """Return the status and the message of an instance's answer to a client without a key: (200, "") for an open one.

    The settings do not tell: operators add tenants to the database. (0, "") if it does not answer.
    """
    with suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
        answer = httpx.get(f"{url}/v1/models", timeout=5, trust_env=False)
        return answer.status_code, "" if answer.is_success else str(answer.json()["error"]["message"])
    return 0, ""


def greeting(settings: AppConfig, url: str, without_key: tuple[int, str] = (200, "")) -> str:
    """Return the text for a new user when the instance is ready: commands to paste, and notes on its limits.

    ``without_key``: how the instance answers a client without a key (``refusal_without_key``).
    """
    served = settings.served()
    model_name = next(iter(served))
    status, refusal = without_key
    closed = status != 200 if status else bool(settings.tenants)
    key = "YOUR_KEY" if closed else "none"
    auth = " -H 'Authorization: Bearer YOUR_KEY'" if closed else ""
    operators = "   (both with an operator key)" if closed or settings.operator_key_sha256 else ""
    request = {"model": model_name, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    body = json.dumps({**request, "temperature": 0, "max_tokens": 32})
    models = {one.model for one in served.values()}
    simulated = any(one.engine_traits.simulated for one in served.values())
    notes = {
        "This model has random weights: it answers nonsense. Bring another with --model.": models <= RECIPES.keys(),
        "SmolLM2-135M-Instruct writes full English sentences, which are not always true.": SMOLLM2 in models,
        "simulated: no model runs; tokens are made up and times come from a cost model.": simulated,
        "No API keys are configured: every client of this port is the tenant `default`.": not closed,
        f"Nobody is answered yet. {refusal}\nwarmpath tenants add NAME --url {url} && "
        f"warmpath keys new NAME --url {url}": status == Overloaded.status,
    }
    lines = [
        f"warmpath serves {name} at {url} with {one.first_replicas} replicas (engine: {one.engine})\n"
        for name, one in served.items()
    ]
    return f"""\
{"".join(lines)}{"".join(f"{note}{chr(10)}" for note, holds in notes.items() if holds)}
curl -N {url}/v1/chat/completions{auth} -H 'Content-Type: application/json' -d '{body}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{key}")
stream = client.chat.completions.create(model="{model_name}", stream=True, temperature=0,
                                        max_tokens=32, messages=[{{"role": "user", "content": "Hello"}}])
for chunk in stream: print(chunk.choices[0].delta.content or "", end="", flush=True)

A chat, and the cache map: {url}/
Cache state: {url}/v1/cache/state   Metrics: {url}/metrics{operators}   Stop: Ctrl-C"""
