"""The long trace is one that the product reads, with conversations that grow."""

from pathlib import Path

import msgspec

from benchmarks.traffic.long_trace import long_trace
from serve_app.traffic.reader import read_traffic
from serve_app.traffic.summary import summary_of


def test_the_long_trace_has_growing_conversations(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in long_trace(3000)))
    workload = read_traffic([path])
    assert len(workload) == 3000 and not workload.warnings
    part = summary_of(workload)["reusable"]
    assert 0.2 < part < 0.8
