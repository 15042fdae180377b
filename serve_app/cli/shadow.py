"""The modules that hide ours. Imports nothing of others: it reports why they cannot be imported."""

from collections.abc import Iterable
from pathlib import Path

CODE = Path(__file__).parents[2]
PACKAGES = ("router", "serve_app")


def shadow(name: str, places: Iterable[str]) -> Path | None:
    """Return the module that Python would import by a name from ``places``, None if it is this code's own."""
    for place in places:
        for module in (Path(place, name, "__init__.py"), Path(place, f"{name}.py")):
            if module.is_file():
                return None if module.parent.resolve() == (CODE / name).resolve() else module
    return None
