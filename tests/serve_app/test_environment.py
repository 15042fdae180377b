"""What importing the package sets in a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import serve_app


@pytest.mark.parametrize(("given", "found"), [(None, serve_app.SPIN_COUNT), ("7", "7")])
def test_openmp_is_told_how_long_to_spin_before_torch_loads_it(given: str | None, found: str) -> None:
    """The replica's module is what a worker imports first; what the operator has set stays."""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    if given is not None:
        environment["GOMP_SPINCOUNT"] = given
    script = (
        "import builtins, os, sys\n"
        "load = builtins.__import__\n"
        "def watch(name, *rest, **named):\n"
        "    if name == 'torch' and 'torch' not in sys.modules: print(os.environ.get('GOMP_SPINCOUNT'))\n"
        "    return load(name, *rest, **named)\n"
        "builtins.__import__ = watch\n"
        "import serve_app.replica.engine_factory\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == found
