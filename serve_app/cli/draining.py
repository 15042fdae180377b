"""The end of applications that run: every ingress refuses new requests, and finishes the answers under way."""

import traceback
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from serve_app.ray_compat import use_outside_of_replicas


def drain(applications: Iterable[str], timeout_s: float, console: Console) -> None:
    """Let every ingress finish its answers; blocks. Never raises, so that a stop continues."""
    from ray import serve as ray_serve

    stopping: dict[str, Any] = {}
    for name in applications:
        try:
            handle = ray_serve.get_app_handle(name)
            use_outside_of_replicas(handle)
            stopping[name] = handle.broadcast("stop", timeout_s)
        except Exception:
            _not_stopped(name, console)
    for name, ingresses in stopping.items():
        try:
            if cut := sum(ingresses.results(timeout_s=timeout_s + 30)):
                console.print(f"{cut} answers were not whole after {timeout_s:g} s, and ended with an error")
        except Exception:
            _not_stopped(name, console)


def _not_stopped(name: str, console: Console) -> None:
    traceback.print_exc()
    console.print(f"an ingress of {name} could not be stopped in order; its answers break off")
