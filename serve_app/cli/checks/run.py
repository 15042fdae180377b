"""All checks, each by what it needs; `warmpath serve`, `check FILE` and `doctor` choose from them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from serve_app.cli.checks import machine, settings, workers
from serve_app.cli.checks.finding import Finding, Look
from serve_app.config.app import SHARED

CheckNeed = Literal[
    "installation", "port", "machine", "names", "database", "workers", "settings", "model", "files", "template"
]

CHECKS: tuple[tuple[CheckNeed, Callable[[Look], Iterator[Finding]]], ...] = (
    ("installation", machine.installation),
    ("installation", machine.shadows),
    ("port", machine.address),
    ("machine", machine.room),
    ("machine", machine.torch),
    ("machine", machine.engines),
    ("names", settings.names),
    ("database", settings.database),
    ("workers", workers.workers),
    ("settings", settings.prompts),
    ("settings", settings.engine),
    ("model", settings.fit),  # it needs the GPUs of a replica, too, which are known by then
    ("model", settings.model),
    ("files", settings.disk_tier),
    ("files", settings.written_files),
    ("template", settings.template),
)
"""In the order of their findings. "names", "database" and "settings" are checked before a model is fetched."""


OF_MODELS: frozenset[CheckNeed] = frozenset({"workers", "settings", "model", "files", "template"})
"""The needs of checks that look at a model's settings."""


def findings(look: Look, *needs: CheckNeed) -> Iterator[Finding]:
    """Yield the findings of the checks with one of these needs; of several models, with the place of each."""
    for need, check in CHECKS:
        if need not in needs:
            continue
        if not look.settings.models or need not in OF_MODELS:
            yield from check(look)
            continue
        for number, one in enumerate(look.settings.served().values()):
            for finding in check(replace(look, settings=one)):
                if finding.subject not in SHARED:
                    place = f"models.{number}.{finding.subject}"
                    yield replace(finding, subject=place, found=f"{one.model_name}: {finding.found}")
                elif not number:
                    yield finding
