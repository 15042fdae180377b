"""`python -m serve_app.checkpoints.sources.gguf_conversion FILE DIRECTORY`: a GGUF file as safetensors, in bfloat16."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Convert the file of the first argument into the directory of the second."""
    gguf, directory = Path(sys.argv[1]), Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype="bfloat16", **_whole_weights(gguf)
    )
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _split_digits(tokenizer, gguf)
    tokenizer.save_pretrained(directory)


def _whole_weights(gguf: Path) -> dict[str, Any]:
    """Return what asks transformers for plain weights: older versions dequantise always, and know no GgufConfig."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(gguf_file=gguf.name, dequantize=True)}


def _split_digits(tokenizer: Any, gguf: Path) -> None:
    """Cut numbers into digits where the file's tokenizer was trained so, which transformers does not know.

    Source: llama.cpp's expressions for the pre-tokenizer "smollm", and the tokenizer.json of SmolLM2.
    """
    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ])  # fmt: skip


if __name__ == "__main__":
    main()
