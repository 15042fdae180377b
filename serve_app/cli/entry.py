"""The entry point: it imports the rest late, to report Ctrl-C, or a module that hides ours, in one sentence."""

import signal
import sys
from collections.abc import Iterable
from pathlib import Path

CODE = Path(__file__).parents[2]
PACKAGES = ("router", "serve_app")


def main() -> None:
    """Run ``warmpath``."""
    try:
        from serve_app.cli.main import app

        app()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except ImportError:
        others = [other for name in PACKAGES if (other := shadow(name, sys.path))]
        if not others:
            raise
        print(
            f"error: Python imports {others[0]} in place of warmpath's in {CODE}: rename or uninstall it",
            file=sys.stderr,
        )
        sys.exit(2)


def shadow(name: str, places: Iterable[str]) -> Path | None:
    """Return the module that Python would import by a name from ``places``, None if it is this code's own."""
    for place in places:
        for module in (Path(place, name, "__init__.py"), Path(place, f"{name}.py")):
            if module.is_file():
                return None if module.parent.resolve() == (CODE / name).resolve() else module
    return None


if __name__ == "__main__":
    main()
