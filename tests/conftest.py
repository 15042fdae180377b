"""Fixtures every test may use."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from serve_app.checkpoints.demo_model import ensure_demo_model

for chatty in ("httpx", "httpcore", "openai", "asyncio", "ray", "urllib3"):
    logging.getLogger(chatty).setLevel(logging.WARNING)


@pytest.hookimpl(tryfirst=True)  # before the workers read the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say what stays together where several workers run the suite (`make test`).

    One worker runs all of integration/, in order, while the other runs what needs no Ray: an instance's start is mostly
    waiting. Every other module goes to one worker whole, for its fixtures.
    """
    for item in items:
        folder, *below = item.path.relative_to(Path(__file__).parent).parts
        item.add_marker(pytest.mark.xdist_group(folder if folder == "integration" else "/".join((folder, *below))))


@pytest.fixture(scope="session")
def demo_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in ``demo`` checkpoint, built once a session outside the user's cache."""
    return ensure_demo_model("demo", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_model_path(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-style checkpoint of random weights, as transformers saves one, with the demo model's tokenizer."""
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM  # seconds, which few tests need

    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    config = LlamaConfig(
        vocab_size=AutoConfig.from_pretrained(demo_model_path).vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    for file in demo_model_path.iterdir():
        if "token" in file.name or file.name == "chat_template.jinja":
            shutil.copy(file, path)
    return path
