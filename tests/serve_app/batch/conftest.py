"""A world of its own for each test of batches in virtual time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve_app.batch.world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "responses.sqlite")
    yield made
    made.close()
