"""`warmpath`: start a local instance, make API keys, check configurations.

Owns flags, progress and the words a newcomer reads. Everything it starts it stops, on SIGINT and SIGTERM alike.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml
from rich.console import Console

from serve_app.checkpoints.adapter_registry import configured_adapters
from serve_app.checkpoints.checkpoint import CheckpointError
from serve_app.checkpoints.demo_model import RECIPES
from serve_app.checkpoints.drafter import load_served_model
from serve_app.checkpoints.sources.resolve import with_local_model
from serve_app.checkpoints.sources.smollm2 import SMOLLM2
from serve_app.cli.check import mistakes_in
from serve_app.cli.haproxy import MAX_CONNECTIONS_PER_ADDRESS, PortBounds
from serve_app.cli.local_ray import keep_token_private, local_environment, port_in_use
from serve_app.config.app import AppConfig
from serve_app.config.live import BadSettings, app_config
from serve_app.engine.protocol import AdapterError
from serve_app.tenants.tenants import make_api_key

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(stderr=True, highlight=False)

START_TIMEOUT_S = 300.0


def main() -> None:
    """Entry point of the ``warmpath`` command."""
    app()


@app.callback()
def _root() -> None:
    """Cache-aware LLM serving: a request goes to the replica that holds its prefix's KV."""


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Option(help="'smollm2' (the default), 'demo', 'small', a directory, a GGUF file or a hub id")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit of a hub id")] = None,
    replicas: Annotated[int | None, typer.Option(help="engine replicas")] = None,
    engine: Annotated[str | None, typer.Option(help="torch, or simulated (a cost model instead of a forward)")] = None,
    port: Annotated[int, typer.Option(help="HTTP port")] = 8000,
    host: Annotated[str, typer.Option(help="HTTP address; 0.0.0.0 opens it to the network")] = "127.0.0.1",
    config: Annotated[Path | None, typer.Option(help="YAML or JSON file of settings")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE, any setting; repeatable")] = None,
    haproxy: Annotated[bool, typer.Option(help="HAProxy in front (Ray Serve's fast path)")] = True,
    max_connections_per_address: Annotated[
        int, typer.Option(help="connections that one address may have open to HAProxy; more are refused", min=1)
    ] = MAX_CONNECTIONS_PER_ADDRESS,
) -> None:
    """Start an instance on this machine and serve until Ctrl-C."""
    try:
        settings = load_settings(
            config, setting or [], model=model, revision=revision, replicas=replicas, engine=engine
        )
    except ValueError as error:
        fail(str(error))
    if settings.allowed_hosts is None and not settings.tenants and host in ("127.0.0.1", "localhost", "::1"):
        # Everybody's pages run on this machine, and nothing but the name in Host tells theirs from ours.
        settings.allowed_hosts = []
    if port_in_use(host, port):
        fail(f"port {port} is taken: stop what listens there, or choose another with --port")
    try:
        settings = with_local_model(settings, say=console.print)
        with console.status(f"[1/4] model {settings.model}: building or finding it"):
            path = load_served_model(settings).path
            configured_adapters(settings.lora_adapters)
    except (CheckpointError, AdapterError) as error:
        fail(str(error))
    console.print(f"[1/4] model {settings.model}: {path}")
    with local_environment(use_haproxy=haproxy, bounds=PortBounds(max_connections_per_address)):
        _serve(settings, host, port)


def load_settings(config: Path | None, assignments: list[str], **flags: Any) -> AppConfig:
    """Merge a settings file, ``NAME=VALUE`` assignments and flags, later ones winning. Raises ValueError."""
    merged: dict[str, Any] = {}
    if config is not None:
        try:
            loaded = yaml.safe_load(config.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"cannot read the settings file {config}: {error}") from error
        if not isinstance(loaded, dict):
            raise ValueError(f"the settings file {config} must hold NAME: VALUE pairs")
        merged.update(loaded)
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator:
            raise ValueError(f"--set takes NAME=VALUE, not {assignment!r}")
        merged[name] = yaml.safe_load(value)
    merged.update({name: value for name, value in flags.items() if value is not None})
    try:
        return app_config(merged)
    except BadSettings as error:
        raise ValueError(f"settings: {error}") from None


def _serve(settings: AppConfig, host: str, port: int) -> None:
    stop = threading.Event()
    _on_signals(stop)
    started_s = time.monotonic()
    with console.status("[2/4] Ray: starting"):
        import ray
        from ray import serve as ray_serve

        from serve_app.app import build_app

        logging.getLogger("ray").setLevel(logging.ERROR)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        needed = (settings.most_replicas + settings.ingress_replicas) * max(settings.replica_num_cpus, 0.1)
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, int(needed) + 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
        keep_token_private()
    # Again, for Ray takes SIGTERM for itself, and leaves at once: what replicas have in memory only would be lost.
    _on_signals(stop)
    console.print("[2/4] Ray: started")
    try:
        with console.status(f"[3/4] {settings.first_replicas} replicas and the ingress: starting"):
            ray_serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly")
            ray_serve.run(build_app(settings), name="warmpath", route_prefix="/", blocking=False)
        console.print(f"[3/4] {settings.first_replicas} replicas and the ingress: started")
        with console.status("[4/4] waiting for /health"):
            _wait_healthy(f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/health", stop)
        if not stop.is_set():
            console.print(f"[4/4] ready after {time.monotonic() - started_s:.0f} s")
            _greet(settings, host, port)
            while not stop.wait(1.0):
                pass
        with console.status("stopping"):
            ray_serve.shutdown()
    finally:
        ray.shutdown()
    console.print("stopped")


def _on_signals(stop: threading.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())


def _wait_healthy(url: str, stop: threading.Event) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and not stop.is_set():
        try:
            with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310  # our own http:// address
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        stop.wait(0.2)
    if not stop.is_set():
        raise RuntimeError(f"{url} did not answer within {START_TIMEOUT_S:.0f} s; see Ray's logs in /tmp/ray")


def _greet(settings: AppConfig, host: str, port: int) -> None:
    url, model_name = f"http://{host}:{port}", settings.model_name
    key = "YOUR_KEY" if settings.tenants else "none"
    auth = " -H 'Authorization: Bearer YOUR_KEY'" if settings.tenants else ""
    body = json.dumps(
        {"model": model_name, "stream": True, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
    )
    lines = [
        f"warmpath serves {model_name} at {url} with {settings.first_replicas} replicas (engine: {settings.engine})"
    ]
    if settings.model in RECIPES:
        lines.append("This model has random weights: it answers nonsense. Bring another with --model.")
    if settings.model == SMOLLM2:
        lines.append("SmolLM2-135M-Instruct writes full English sentences, which are not always true.")
    if settings.engine == "simulated":
        lines.append("simulated: no model runs; tokens are made up and times come from a cost model.")
    if not settings.tenants:
        lines.append("No API keys are configured: everyone who can reach this port is the tenant `default`.")
    lines += [
        "",
        f"curl -N {url}/v1/chat/completions{auth} -H 'Content-Type: application/json' -d '{body}'",
        "",
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}/v1", api_key="{key}")',
        f'stream = client.chat.completions.create(model="{model_name}", stream=True, max_tokens=32,',
        '                                        messages=[{"role": "user", "content": "Hello"}])',
        'for chunk in stream: print(chunk.choices[0].delta.content or "", end="", flush=True)',
        "",
        f"What the caches hold: {url}/v1/cache/state   Metrics: {url}/metrics   Stop: Ctrl-C",
    ]
    print("\n".join(lines), flush=True)


@app.command()
def keys() -> None:
    """Make an API key: give the key to the tenant, put the SHA-256 into the settings file."""
    key, digest = make_api_key()
    print(f"key     {key}\nsha256  {digest}")


@app.command()
def check(file: Annotated[Path, typer.Argument(help="Serve config, KubeRay RayService, or file of settings")]) -> None:
    """Say what is wrong with a configuration before it is deployed; leaves with 1 where something is."""
    try:
        found = mistakes_in(file.read_text())
    except (OSError, ValueError) as error:
        fail(f"cannot read {file}: {error}")
    for mistake in found:
        place = f"{mistake.place}: " if mistake.place else ""
        print(f"{file}:{mistake.line}: {place}{mistake.what}")
    if found:
        raise typer.Exit(1)
    print(f"{file}: nothing is wrong")


def fail(message: str) -> NoReturn:
    """Print an error and leave with status 2."""
    console.print(f"error: {message}", style="red")
    sys.exit(2)
