"""Where the command begins: it imports what takes time itself, so that Ctrl-C ends that with a word too.

Where the import fails because another module has the name of one of ours, that is said.
"""

from __future__ import annotations

import signal
import sys

from serve_app.cli.shadow import CODE, PACKAGES, shadow


def main() -> None:
    """Run ``warmpath``."""
    try:
        from serve_app.cli.main import main as run

        run()
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
