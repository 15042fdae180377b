"""What is known of a metric family before it has a sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

HISTOGRAM = "(histogram)"


@dataclass(frozen=True, slots=True)
class Family:
    """``name``: as PromQL has it, counters with ``_total``. ``labels``: all that its samples may have, but ``le``.

    ``help``: what it counts or measures, and when it moves; the unit is in the name.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    histogram: bool = False

    @property
    def kind(self) -> Kind:
        """Counters end in ``_total``; other numbers may fall."""
        if self.histogram:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


@dataclass(frozen=True, slots=True)
class Section:
    """Families that belong together. ``note``: what all of them have in common."""

    title: str
    note: str
    families: tuple[Family, ...]


def section(title: str, note: str, text: str) -> Section:
    """Return a section of families that are written ``name: labels``, each with its help indented below."""
    families: list[Family] = []
    for line in text.strip().splitlines():
        if line.startswith(" "):
            families[-1] = replace(families[-1], help=f"{families[-1].help} {line.strip()}".strip())
        else:
            name, _, words = line.partition(": ")
            labels = tuple(label for label in words.split() if label != HISTOGRAM)
            families.append(Family(name, "", labels, HISTOGRAM in words))
    return Section(title, note, tuple(families))
