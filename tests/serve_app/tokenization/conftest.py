"""The tokenizer of the demo model."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.tokenization.tokenizer import PromptTokenizer


@pytest.fixture(scope="session")
def tokenizer(demo_model_path: Path) -> PromptTokenizer:
    return PromptTokenizer(demo_model_path)


@pytest.fixture
def cold(demo_model_path: Path) -> PromptTokenizer:
    """One that remembers nothing yet."""
    return PromptTokenizer(demo_model_path)
