"""Checkpoints with tokenizers that differ from the demo model's, and prompts in a chat template's form."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from serve_app.tokenization.tokenizer import PromptTokenizer


def variant_of(source: Path, target: Path, change: Callable[[Tokenizer], None] | None = None) -> Path:
    """Copy a checkpoint, with links to its weights; call ``change`` with its tokenizer, unless it is None."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    for weights in source.glob("*.safetensors"):
        (target / weights.name).symlink_to(weights)
    if change is not None:
        tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        change(tokenizer)
        tokenizer.save(str(target / "tokenizer.json"))
    return target


def sentencepiece_like(directory: Path, source: Path, **more: Any) -> PromptTokenizer:
    """Build a Llama-2-like tokenizer: spaces as U+2581, bytes for unknown characters, the first space dropped."""
    variant_of(source, directory)
    bytes_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\u2581?[^\u2581]+|\u2581"), behavior="isolated")
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<|im_start|>", "<|im_end|>", *bytes_tokens], show_progress=False
    )
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 5, "a b c d e f 0 1 2 3"], trainer)
    state = json.loads(made.to_str())
    for token in state["added_tokens"]:
        token["special"] = not token["content"].startswith("<0x")
    state["added_tokens"] = [token for token in state["added_tokens"] if token["special"]]
    (directory / "tokenizer.json").write_text(json.dumps(state))
    return PromptTokenizer(directory, **more)


def conversation(turns: int, chars: int) -> str:
    """Return chat turns of this many characters each, all different."""
    turn = "".join(chr(97 + i * i % 26) + " " * (i % 5 == 0) for i in range(chars))
    return "".join(f"<|im_start|>user\n{turn} {i}<|im_end|>\n" for i in range(turns))
