"""One cluster for all modules of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.local import LocalCluster
from tests.integration.conftest import alone
from tests.integration.scaling import FAULTS


@pytest.fixture(scope="package")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where mortal replicas look for what they die of."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="package")
def cluster(faults: Path) -> Iterator[LocalCluster]:
    root = str(Path(__file__).parents[3])  # its processes import what is in this folder
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with alone(LocalCluster(1, env={FAULTS: str(faults), "PYTHONPATH": path})) as made:
        yield made
