"""Where the command begins: it imports the rest, so that Ctrl-C, or a module in place of ours, ends with a word."""

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
    """Return what is imported of that name, where the first of ``places`` that has one is not where this code lies."""
    for place in places:
        for module in (Path(place, name, "__init__.py"), Path(place, f"{name}.py")):
            if module.is_file():
                return None if module.parent.resolve() == (CODE / name).resolve() else module
    return None


if __name__ == "__main__":
    main()
