"""Lets vLLM's V2 runner work on a CPU: Triton's interpreter runs its kernels, slowly. First on a process' path."""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import triton.backends

triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
