"""The list of checks, and which command asks which. Each takes a case, yields findings and starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from serve_app.cli.checks import machine, network, settings, software
from serve_app.cli.checks.finding import Case, Finding

Asker = Literal["command", "start", "file", "doctor"]
"""`warmpath serve` before it starts a process; that process, which has fetched the model; `check FILE`; `doctor`."""

CHECKS: tuple[tuple[Callable[[Case], Iterator[Finding]], tuple[Asker, ...]], ...] = (
    (settings.prompts, ("command", "file")),
    (settings.engine, ("command", "file")),
    (software.installation, ("doctor",)),
    (software.shadows, ("doctor",)),
    (software.packages, ("doctor",)),
    (software.vllm, ("doctor",)),
    (network.address, ("command", "doctor")),
    (network.inner_ports, ("doctor",)),
    (network.ray, ("doctor",)),
    (settings.fit, ("start", "file")),
    (settings.model, ("start", "file")),
    (settings.disk_tier, ("start",)),
    (settings.usage_file, ("start",)),
    (machine.memory, ("doctor",)),
    (machine.shared_memory, ("doctor",)),
    (machine.disks, ("doctor",)),
    (machine.models, ("doctor",)),
    (machine.torch, ("doctor",)),
)


def findings(asker: Asker, case: Case) -> Iterator[Finding]:
    """Yield what the checks of one asker find, in the order of the list."""
    for check, askers in CHECKS:
        if asker in askers:
            yield from check(case)


def problems(asker: Asker, case: Case) -> list[str]:
    """Return what is in the way, a sentence each."""
    return [finding.sentence for finding in findings(asker, case) if finding.state == "problem"]
