"""Checkpoints whose tokenizer differs from the demo model's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


def variant_of(source: Path, target: Path, change: Any) -> Path:
    """Copy a checkpoint without its weights; ``change`` is called with its tokenizer, where it is not None."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    if change is not None:
        tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        change(tokenizer)
        tokenizer.save(str(target / "tokenizer.json"))
    return target
