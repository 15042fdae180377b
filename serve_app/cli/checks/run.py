"""All checks, each by what it needs; `warmpath serve`, `check FILE` and `doctor` choose from them."""

from collections.abc import Callable, Iterator
from typing import Literal

from serve_app.cli.checks import machine, settings
from serve_app.cli.checks.finding import Finding, Look

CheckNeed = Literal["installation", "port", "machine", "settings", "model", "files", "template"]

CHECKS: tuple[tuple[CheckNeed, Callable[[Look], Iterator[Finding]]], ...] = (
    ("installation", machine.installation),
    ("installation", machine.shadows),
    ("port", machine.address),
    ("machine", machine.room),
    ("machine", machine.torch),
    ("machine", machine.engines),
    ("settings", settings.prompts),
    ("settings", settings.engine),
    ("model", settings.fit),  # it needs the GPUs of a replica, too, which are known by then
    ("model", settings.model),
    ("files", settings.disk_tier),
    ("files", settings.written_files),
    ("template", settings.template),
)
"""In the order of their findings. "settings" are checked before a model is fetched."""


def findings(look: Look, *needs: CheckNeed) -> Iterator[Finding]:
    """Yield the findings of the checks with one of these needs."""
    for need, check in CHECKS:
        if need in needs:
            yield from check(look)
