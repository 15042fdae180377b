"""What tests of generation share: the demo model's tokenizer, and what compiles grammars for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.structured.compiler import GrammarCompiler
from serve_app.tokenization.tokenizer import PromptTokenizer


@pytest.fixture(scope="session")
def tokenizer(demo_model_path: Path) -> PromptTokenizer:
    return PromptTokenizer(demo_model_path)


@pytest.fixture(scope="session")
def compiler(demo_model_path: Path) -> GrammarCompiler:
    info = load_checkpoint_info(demo_model_path)
    return GrammarCompiler(info.path, info.vocab_size, info.eos_token_ids)
