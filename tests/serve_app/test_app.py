"""What whoever deploys the application has to load."""

from __future__ import annotations

import subprocess
import sys


def test_deploying_loads_no_model_library() -> None:
    """torch and transformers take seconds, and only ingresses and replicas need them."""
    script = "import sys, serve_app.app; print(*{'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
