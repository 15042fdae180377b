"""What large bodies took is given back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from serve_app.ingress.memory import return_large_buffers
if sys.argv[1] == "yes":
    assert return_large_buffers()
def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) // 1024
before = resident()
kept = []
for round in range(8):
    large = [bytes(bytearray(b"x" * (6 << 20))) for _ in range(6)]
    kept.append(bytes(64 << 10))
    del large
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
def test_buffers_go_back_to_the_system() -> None:
    """Eight rounds of 36 MiB, each leaving a small buffer on top of what it freed: nothing of them stays resident."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, "yes"], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 6
