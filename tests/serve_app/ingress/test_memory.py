"""What large bodies took is given back, and torch is not loaded."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

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


def test_an_ingress_tokenizes_without_torch(demo_model_path: Path) -> None:
    """Chat template and token ids are those of a process that has torch."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from serve_app.ingress.memory import do_without_torch\n"
        "if sys.argv[2] == 'without': do_without_torch()\n"
        "import serve_app.ingress.assembly, serve_app.ingress.routes.application\n"
        "from serve_app.tokenization.tokenizer import PromptTokenizer\n"
        "tokenizer = PromptTokenizer(Path(sys.argv[1]))\n"
        "text = tokenizer.template.render([{'role': 'user', 'content': 'Say \u00fc.'}]).text\n"
        "print(repr(text), tokenizer.encode(text, b'r' * 16).token_ids.tolist())\n"
        "print(sum(name.startswith('torch') for name in sys.modules), file=sys.stderr)\n"
    )
    outputs = {}
    for how in ("with", "without"):
        done = subprocess.run(
            [sys.executable, "-c", script, str(demo_model_path), how], capture_output=True, text=True, check=True
        )
        outputs[how] = done.stdout, int(done.stderr.splitlines()[-1])
    assert outputs["without"][0] == outputs["with"][0] != ""
    assert outputs["without"][1] == 1 < outputs["with"][1]
