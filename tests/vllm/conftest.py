"""Tests that need vLLM: `make test-vllm`. Where it is not installed, their files are not even imported."""

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM starts in half a minute on an idle machine, and in minutes on a busy one."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(900))
            # vLLM and what it imports warn of their own affairs.
            item.add_marker(pytest.mark.filterwarnings("default"))
