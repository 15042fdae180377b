"""The warmpath application. Importing it before torch settles what OpenMP reads when torch loads it."""

import os
from collections.abc import Mapping
from typing import Any

SPIN_COUNT = "30000"
"""Turns of libgomp's waiting loop, about 2 ms. Its own 300,000 are 16 ms, and where the thread that is waited for has
lost its core to another process, every operation of a step waits that long: a decode step took 270 ms in place of 85.
With the machine to itself the engine is as fast with either; at 10,000 its threads fall asleep between operations."""

os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def build_app(args: Mapping[str, Any]) -> Any:
    """Return the Serve application: `serve run serve_app:build_app model=demo replicas=2`. Raises ``BadSettings``."""
    from serve_app.app import build_app as build  # only here: it imports Ray, which most modules do without

    return build(args)


def __getattr__(name: str) -> Any:
    """Make ``serve_app:app``, the application with every setting's default: `serve build` takes no function."""
    if name != "app":
        raise AttributeError(name)
    return build_app({})
