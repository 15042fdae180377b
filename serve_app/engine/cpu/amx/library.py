"""The AMX kernels: built from their C sources by this machine's compiler, kept in a private directory, and loaded."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

COMPILED = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warmpath" / "compiled"
"""Where compiled code is kept, readable and writable for this user alone."""

_SOURCES = Path(__file__).parent
_HEADERS = ("tiles.h", "many_queries.h", "few_queries.h")

_FLAGS = (
    *("-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp"),
    *("-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
)
_NEEDED = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16"})

_BUILD_SECONDS = 120
_REASON_LENGTH = 120

_SYS_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64 gives a process its tile registers when it asks for them."""

LINEAR_DIM = 32
"""bfloat16 inputs that a product takes at once, and outputs that its weights are packed for."""

_TILE_DIM = 32
"""bfloat16 numbers of a head that a product takes at once."""

_TILE_KEYS = 16
"""Keys that a product takes at once; they have to lie in one block."""


SWITCH = "WARMPATH_AMX"
"""The environment variable that, at 0, has a process work as if its CPU had no AMX."""


class NoAmx(RuntimeError):
    """The kernels cannot run here; the message says why."""


class HeadRows(ctypes.Structure):
    """Rows of heads: an address, and the strides from row to row and head to head, in elements."""

    _fields_ = (("at", ctypes.c_void_p), ("row", ctypes.c_int64), ("head", ctypes.c_int64))


class AmxAttention:
    """``attention.c`` for one head size. Calls release the GIL and use torch's own OpenMP threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.lanes: int = library.warmpath_lanes()
        """Queries of one job at most."""
        self.few: int = library.warmpath_few()
        """A job of up to this many queries is one task for all heads."""
        self.attend = library.warmpath_attend
        self.attend.argtypes = (*(HeadRows,) * 3, *(ctypes.c_void_p,) * 7, *(ctypes.c_int,) * 3, ctypes.c_float)
        self.attend.restype = None


class AmxLinear:
    """``linear.c``. Calls release the GIL and use torch's own OpenMP threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.pack = library.warmpath_pack
        self.pack.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self.pack.restype = None
        self.linear = library.warmpath_linear
        self.linear.argtypes = (*(ctypes.c_void_p,) * 4, *(ctypes.c_int64,) * 3)


def load_attention(head_dim: int, block_size: int) -> AmxAttention:
    """Return the attention kernel for these sizes, built first where it is not there yet (a second). Raises NoAmx."""
    if head_dim % _TILE_DIM or block_size % _TILE_KEYS:
        raise NoAmx(
            f"head_dim {head_dim} must be a multiple of {_TILE_DIM} and block_size {block_size} one of {_TILE_KEYS}"
        )
    return AmxAttention(_load("attention.c", f"-DHEAD_DIM={head_dim}"))


def load_linear() -> AmxLinear:
    """Return the kernel of linear layers, built first where it is not there yet. Raises NoAmx."""
    return AmxLinear(_load("linear.c"))


def _load(source: str, *flags: str) -> ctypes.CDLL:
    if os.environ.get(SWITCH) == "0":
        raise NoAmx(f"{SWITCH}=0 switches the kernels off")
    missing = _NEEDED - _cpu_flags()
    if missing:
        raise NoAmx(f"this CPU lacks {', '.join(sorted(missing))}")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise NoAmx("there is no C compiler (gcc)")
    command = (compiler, *_FLAGS, *flags)
    read = b"".join((_SOURCES / name).read_bytes() for name in (source, *_HEADERS))
    digest = sha256("\0".join(command).encode() + read).hexdigest()[:32]
    path = COMPILED / f"{Path(source).stem}-{digest}.so"
    if not path.exists():
        _build(command, _SOURCES / source, path)
    # What is loaded runs as this user.
    if _others_may_write(path, path.parent):
        raise NoAmx(f"{path} or its directory belongs to somebody else or others may write it: remove it")
    if ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA):
        raise NoAmx("the operating system does not give this process AMX registers")
    return ctypes.CDLL(str(path))


def _others_may_write(*paths: Path) -> bool:
    """Return whether one of ``paths`` belongs to another user, or is writable for others. Raises OSError."""
    found = [path.stat() for path in paths]
    return any(one.st_uid != os.getuid() or one.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for one in found)


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _build(command: tuple[str, ...], source: Path, path: Path) -> None:
    """Compile to a name of its own and rename: what lies under ``path`` is whole."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".amx-", dir=path.parent) as directory:
            built = Path(directory) / path.name
            whole = (*command, str(source), "-o", str(built), "-lm")
            done = subprocess.run(whole, capture_output=True, text=True, timeout=_BUILD_SECONDS)  # noqa: S603
            if done.returncode:
                said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
                raise NoAmx(f"{command[0]} failed: {said[-_REASON_LENGTH:]}")
            built.chmod(0o700)
            built.rename(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAmx(f"could not build in {path.parent}: {error}") from error
