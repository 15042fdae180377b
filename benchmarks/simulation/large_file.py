"""A file of a million requests: how long its import takes, and a simulated replay of eight settings; memory of both.

Requests are those of growing conversations behind one common block, in Mooncake's form.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.common.harness import Findings, Options, benchmark, flag
from benchmarks.common.report import BenchmarkError
from benchmarks.traffic.long_trace import long_trace

LOOK_S = 0.5
POLICIES, REPLICAS = "estimated_ttft,power_of_two,round_robin,sglang", "48,64"


def write_file(path: Path, requests: int, seed: int) -> None:
    """Write the file."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        for line in long_trace(requests, seed):
            file.write(encode(line) + b"\n")


def measured(arguments: list[str], output: Path) -> dict[str, Any]:
    """Run `warmpath`; return its seconds, and the most memory of all its processes together, each page once."""
    started_s = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "serve_app.cli.entry", *arguments], stdout=file, stderr=subprocess.STDOUT
        )
    seen = psutil.Process(process.pid)
    most = 0
    while process.poll() is None:
        try:
            most = max(most, sum(each.memory_full_info().pss for each in [seen, *seen.children(recursive=True)]))
        except psutil.Error:
            continue
        time.sleep(LOOK_S)
    if process.returncode:
        raise BenchmarkError(f"warmpath {' '.join(arguments)} failed: {output.read_text()[-500:]}")
    return {"seconds": time.monotonic() - started_s, "memory_bytes": most}


@benchmark(__doc__, flag("requests", 1_000_000), flag("seed", 1), simulated=True)
def run(options: Options) -> Findings:
    """Write, import and replay the file."""
    with tempfile.TemporaryDirectory() as folder:
        source, path, output = (Path(folder) / name for name in ("source.jsonl", "traffic.jsonl", "output"))
        write_file(source, options.requests, options.seed)
        imported = measured(["traffic", "import", str(source), "--to", str(path)], output)
        flags = ["--policies", POLICIES, "--replicas", REPLICAS, "--pool-tokens", "1000000"]
        flags += ["--prefill-rate", "8000", "--decode-step-ms", "20", "--json"]
        replayed = measured(["replay", str(path), *flags], output)
        text = output.read_text()
        rows = json.loads(text[text.index("{\n") :])["rows"]
    parts = [
        f"{what} {figures['seconds']:.0f} s, {figures['memory_bytes'] / 1e9:.2f} GB"
        for what, figures in (("import", imported), (f"replay of {len(rows)} settings", replayed))
    ]
    said = f"{options.requests:,} requests: {'; '.join(parts)}."
    return Findings({"import": imported, "replay": replayed, "rows": rows}, said)
