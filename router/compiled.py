"""The router's hot modules as machine code: the same sources through mypyc, where somebody had that done.

Owns the build (``warmpath compile``) and the choice at import. What is built is kept outside the sources, under a
digest of all of them: an edit makes it stale, and stale code is never taken. Without a build, or with
``WARMPATH_COMPILED_ROUTER=0``, the sources run as they are. Knows nothing of what the modules do.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

from router.private_files import COMPILED, others_may_write

MODULES = (
    *("adapter_places", "block_table", "core", "counters", "decisions", "demand", "directory", "holder_sets"),
    *("hot_prefixes", "in_flight", "load", "plan", "policies", "pull", "ranking", "replica_load", "routers_beside"),
    "tier_slots",
)
"""What a decision runs through. Classes that travel between processes are not among them."""

SWITCH = "WARMPATH_COMPILED_ROUTER"

_SOURCES = Path(__file__).parent
_BUILD_SECONDS = 600
_log = logging.getLogger(__name__)


class NotCompiled(RuntimeError):
    """The router cannot be compiled here; the message says why and what to do."""


def directory() -> Path:
    """Return where the build of exactly these sources for this Python is, or would be."""
    digest = sha256(sys.version.encode())
    for path in sorted(_SOURCES.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return COMPILED / f"router-{digest.hexdigest()[:32]}"


def activate(package_path: list[str]) -> bool:
    """Have compiled modules found before their sources, where there are any; return whether there are."""
    if os.environ.get(SWITCH) == "0":
        return False
    built = directory()
    if not built.is_dir():
        return False
    try:
        if others_may_write(COMPILED, built, *built.rglob("*")):
            _log.warning("%s belongs to somebody else or others may write there: not used, remove it", built)
            return False
        for shared in built.glob("*__mypyc*"):  # what the modules have in common; they ask for it by name
            name = shared.name.split(".", 1)[0]
            spec = importlib.util.spec_from_file_location(name, shared)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[name] = module
    except (ImportError, OSError) as error:
        _log.warning("the compiled router in %s is not used: %s", built, error)
        return False
    package_path.insert(0, str(built / "router"))
    return True


def build() -> Path:
    """Compile the modules, unless it was done, and return where they are: about half a minute. Raises NotCompiled."""
    target = directory()
    if target.is_dir():
        return target
    if importlib.util.find_spec("mypyc") is None:
        raise NotCompiled("mypyc is not installed: pip install 'warmpath[compile]'")
    try:
        COMPILED.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".router-", dir=COMPILED) as scratch:
            shutil.copytree(_SOURCES, Path(scratch) / "router", ignore=shutil.ignore_patterns("__pycache__"))
            command = [sys.executable, "-m", "mypyc", *(f"router/{name}.py" for name in MODULES)]
            done = subprocess.run(  # noqa: S603
                command, cwd=scratch, capture_output=True, text=True, timeout=_BUILD_SECONDS
            )
            if done.returncode:
                said = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
                reason = (said or ["it said nothing"])[0][:200]
                raise NotCompiled(f"mypyc needs gcc and Python's header files (python3-dev), and failed: {reason}")
            kept = Path(scratch) / "kept"
            (kept / "router").mkdir(parents=True, mode=0o700)
            kept.chmod(0o700)
            for found in (*Path(scratch).glob("*.so"), *Path(scratch).glob("router/*.so")):
                found.chmod(0o700)
                found.rename(kept / found.relative_to(scratch))
            kept.rename(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        if not target.is_dir():  # or another process was faster; what it built is the same
            raise NotCompiled(f"could not build in {COMPILED}: {error}") from error
    return target
