"""Tests that need vLLM: `make test-vllm`. If it is not installed, their files are not even imported."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.marks import mark

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


LONGEST = "gpu_benchmark speculation joins_and_leaves served native ranks models pulls library".split()
"""Test files that take minutes: they begin first, so that all workers end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark(items, Path(__file__).parent)
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(scope="session", autouse=True)
def quick_starts() -> Iterator[None]:
    """Engines in the tests' own processes start in three seconds instead of twenty."""
    from tests.vllm.cores import forked_cores

    with forked_cores():
        yield
