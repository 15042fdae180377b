"""A GGUF file -> a checkpoint in the model cache, dequantised once by transformers.

The conversion runs in a process of its own: it needs torch and, for a moment, all weights in memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from serve_app.checkpoints.checkpoint import CheckpointError
from serve_app.checkpoints.model_cache import default_cache_dir, ensure_made

CONVERSION = 1
"""Raised whenever the same file would give another checkpoint, so that an old one is not taken for it."""


def ensure_converted(gguf: Path, cache_dir: Path | None = None) -> Path:
    """Return the directory of a GGUF file's checkpoint, converted first if that is not there.

    A file that was changed, by size or time, is converted again. Raises CheckpointError where it cannot be.
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
        "HF_HUB_OFFLINE": "1",  # all is in the file
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, "-m", "serve_app.checkpoints.sources.gguf_conversion", str(gguf), str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: S603  # our own command
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        raise CheckpointError(f"transformers cannot convert {gguf.name}: {reason}")
