"""Where the command begins: it imports what takes time itself, so that Ctrl-C ends that with a word too."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run ``warmpath``."""
    try:
        from serve_app.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
