"""Tests that need vLLM: `make test-vllm`. If it is not installed, their files are not even imported."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.marks import mark

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark(items, Path(__file__).parent)


@pytest.fixture(scope="session", autouse=True)
def quick_starts() -> Iterator[None]:
    """Engines in the tests' own processes start in three seconds instead of twenty."""
    from tests.vllm.cores import forked_cores

    with forked_cores():
        yield
