"""The warmpath application. Import it before torch: it sets an environment variable for torch's OpenMP."""

import os
from collections.abc import Mapping
from typing import Any

SPIN_COUNT = "30000"
"""Iterations of libgomp's wait loop, about 2 ms. Its default of 300,000 takes 16 ms. If another process takes a
thread's core, every operation of a step waits that long: a decode step took 270 ms instead of 85. On an idle machine
both values are equally fast; with 10,000, threads fall asleep between operations."""

os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def build_app(args: Mapping[str, Any]) -> Any:
    """Return the Serve application: `serve run serve_app:build_app model=demo replicas=2`. Raises ``BadSettings``."""
    from serve_app.app import build_app as build  # imported late: it imports Ray, which most modules do not need

    return build(args)


def __getattr__(name: str) -> Any:
    """Make ``serve_app:app``, the application with default settings: `serve build` accepts no function."""
    if name != "app":
        raise AttributeError(name)
    return build_app({})
