"""A GGUF file -> a checkpoint in the model cache, dequantised to bfloat16 once by transformers.

The conversion, `python -m serve_app.checkpoints.sources.gguf_file FILE DIRECTORY`, needs torch and all weights in
memory, and runs in a separate process.
"""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from serve_app.checkpoints.checkpoint import CheckpointError
from serve_app.checkpoints.model_cache import default_cache_dir, ensure_made

CONVERSION = 1
"""Incremented whenever the same file produces another checkpoint, so that old ones are not used."""


def ensure_converted(gguf: Path, cache_dir: Path | None = None) -> Path:
    """Return the directory of a GGUF file's checkpoint, converted first if the file is new or has changed.

    Raises CheckpointError.
    """
    status = gguf.stat()
    version = sha256(f"{gguf}:{status.st_size}:{status.st_mtime_ns}".encode()).hexdigest()[:16]
    target = (cache_dir or default_cache_dir()) / f"{gguf.stem}-{version}-{CONVERSION}"
    return ensure_made(target, lambda directory: convert(gguf, directory))


def convert(gguf: Path, directory: Path) -> None:
    """Write the checkpoint of a GGUF file into ``directory``. Raises CheckpointError with transformers' reason."""
    root = str(Path(__file__).parents[3])
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",  # the file is complete
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, "-m", "serve_app.checkpoints.sources.gguf_file", str(gguf), str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: S603  # our own command
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        raise CheckpointError(f"transformers cannot convert {gguf.name}: {reason}")


def _convert_here(gguf: Path, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype="bfloat16", **_whole_weights(gguf)
    )
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _split_digits(tokenizer, gguf)
    tokenizer.save_pretrained(directory)


def _whole_weights(gguf: Path) -> dict[str, Any]:
    # Older versions of transformers always dequantise, and have no GgufConfig.
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(gguf_file=gguf.name, dequantize=True)}


def _split_digits(tokenizer: Any, gguf: Path) -> None:
    """Split numbers into digits for the pre-tokenizer "smollm", which transformers does not know.

    Source: llama.cpp's expressions, and the tokenizer.json of SmolLM2.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ])  # fmt: skip


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]))
