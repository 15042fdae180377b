"""Fixtures every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.checkpoints.demo_model import ensure_demo_model


@pytest.fixture(scope="session")
def demo_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in ``demo`` checkpoint, built once a session outside the user's cache."""
    return ensure_demo_model("demo", tmp_path_factory.mktemp("models"))
