"""The tokenizer of the demo model, as it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.tokenization.tokenizer import PromptTokenizer


@pytest.fixture
def tokenizer(demo_model_path: Path) -> PromptTokenizer:
    return PromptTokenizer(demo_model_path, cache_bytes=8 << 20, block_size=16)
