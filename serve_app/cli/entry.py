"""The entry point: it imports the rest late, to report Ctrl-C, or a module that hides ours, in one sentence."""

import signal
import sys

from serve_app.cli.shadow import CODE, PACKAGES, shadow


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


if __name__ == "__main__":
    main()
