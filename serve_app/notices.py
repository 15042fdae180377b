"""An application's notice board in Ray's GCS: messages of a process to distant readers, or after its end.

Each of several models has a board of its own. Notices are few and small, hold no prompt and no key, and outlive their
writer. Every function waits for the GCS.
"""

import time
from typing import Any

import msgspec

from serve_app.config.app import REPLICAS
from serve_app.ray_compat import kv_delete, kv_items, kv_put

KEPT = 32
"""The number of notices that an application keeps of each kind."""

SHOWN_KINDS = ("autoscaling", "configuration", "handover", "prewarm")
"""The kinds that operators see. The controller and replicas that may be gone left them."""


def board_name(app_name: str, deployment: str) -> str:
    """Return the name of a deployment's board: its application's, or that of its model if there are several."""
    return f"{app_name}#{deployment}" if figures_prefix(deployment) else app_name


def figures_prefix(deployment: str) -> str:
    """Return what the names of an ingress' figures about a deployment begin with, "" for that of a single model."""
    return f"{deployment}:" if deployment.startswith(f"{REPLICAS}-") else ""


def post(app_name: str, kind: str, name: str, notice: dict[str, Any]) -> None:
    """Post a notice, replacing an earlier one of that name; ``at_s``, the wall-clock time, is added."""
    kv_put(_key(app_name, kind, name), msgspec.json.encode({**notice, "at_s": time.time()}))
    for old, _ in _notices(app_name, kind)[KEPT:]:
        kv_delete(old)


def remove(app_name: str, kind: str, name: str) -> None:
    """Remove a notice; a missing one is ignored."""
    kv_delete(_key(app_name, kind, name))


def clear(app_name: str, kind: str) -> None:
    """Remove all notices of a kind."""
    for key, _ in _notices(app_name, kind):
        kv_delete(key)


def read(app_name: str, kind: str) -> list[dict[str, Any]]:
    """Return an application's notices of a kind, newest first."""
    return [notice for _, notice in _notices(app_name, kind)]


def read_shown(app_name: str) -> dict[str, list[dict[str, Any]]]:
    """Return an application's or a model's notices of ``SHOWN_KINDS``, newest first."""
    shown = {kind: read(app_name, kind) for kind in SHOWN_KINDS}
    whole, of_model, _ = app_name.rpartition(f"#{REPLICAS}-")
    if of_model:  # ingresses, which have all models in common, write to the application's
        shown["configuration"] += read(whole, "configuration")
    return shown


def _key(app_name: str, kind: str, name: str = "") -> bytes:
    return f"{app_name}\0{kind}\0{name}".encode()


def _notices(app_name: str, kind: str) -> list[tuple[bytes, dict[str, Any]]]:
    notices = [(key, msgspec.json.decode(value)) for key, value in kv_items(_key(app_name, kind))]
    return sorted(notices, key=lambda entry: entry[1]["at_s"], reverse=True)
