"""Modules of others with the names of warmpath's packages: what is found first is imported. Imports nothing of ours."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

CODE = Path(__file__).parents[2]
"""Where this code lies."""

PACKAGES = ("router", "serve_app")


def shadow(name: str, places: Iterable[str]) -> Path | None:
    """Return what is imported of that name, where the first of ``places`` that has one is not where this code lies."""
    for place in places:
        for module in (Path(place, name, "__init__.py"), Path(place, f"{name}.py")):
            if module.is_file():
                return None if module.parent.resolve() == (CODE / name).resolve() else module
    return None
