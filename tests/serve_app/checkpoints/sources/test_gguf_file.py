"""A GGUF file that the test writes itself becomes a checkpoint with the same weights, tokens, template and end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from serve_app.checkpoints.checkpoint import CheckpointError, load_checkpoint_info
from serve_app.checkpoints.demo_model import IM_END
from serve_app.checkpoints.sources.gguf_file import ensure_converted
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.checkpoints.sources.tiny_gguf import POSITIONS, write_tiny_gguf

TEXT = "In 2026 the clerk read 1234 lines, and 7 more."


def test_the_checkpoint_is_what_the_file_holds(tmp_path: Path, demo_model_path: Path) -> None:
    """Weights are the file's, rounded to bfloat16; digits, the template and the end token are as the file says."""
    kept = write_tiny_gguf(tmp_path / "tiny.gguf", demo_model_path)
    path = ensure_converted(tmp_path / "tiny.gguf", tmp_path / "cache")
    saved = load_file(path / "model.safetensors")
    assert saved.keys() == kept.keys()
    for name, weights in kept.items():
        assert torch.equal(saved[name], torch.from_numpy(weights).bfloat16()), name

    tokenizer = AutoTokenizer.from_pretrained(path)
    info = load_checkpoint_info(path)
    assert info.eos_token_ids == (tokenizer.convert_tokens_to_ids(IM_END),)
    assert info.max_model_len == POSITIONS
    pieces = tokenizer.tokenize(TEXT)
    assert "".join(piece.replace("Ġ", " ") for piece in pieces) == TEXT
    assert [piece for piece in pieces if any(map(str.isdigit, piece))] == list("202612347")
    asked = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == "<|im_start|>user: Hi<|im_end|>"
    ours = PromptTokenizer(path, cache_bytes=1 << 20, block_size=16).encode(TEXT, b"\0" * 16).token_ids
    assert list(ours) == tokenizer.encode(TEXT)

    assert ensure_converted(tmp_path / "tiny.gguf", tmp_path / "cache") == path
    assert [child.name for child in (tmp_path / "cache").iterdir()] == [path.name]


def test_what_transformers_cannot_read_is_said_in_one_line(tmp_path: Path) -> None:
    """A file that is no GGUF leaves no checkpoint."""
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(CheckpointError, match=r"transformers cannot convert broken.gguf: \w+") as refused:
        ensure_converted(tmp_path / "broken.gguf", tmp_path / "cache")
    assert "\n" not in str(refused.value)
    assert list((tmp_path / "cache").iterdir()) == []
