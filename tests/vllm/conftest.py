"""Tests that need vLLM: `make test-vllm`. Where it is not installed, nothing here is even imported."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
