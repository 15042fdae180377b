"""Traces: tokens made from ids share prefixes exactly as the ids do, and a trace obeys the format's rules."""

import argparse
import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.trace import DEFAULT_TRACE, add_trace_flags, chosen_trace, token_ids_of
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest, read_trace

ROW = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [3, 9]}


def test_tokens_share_prefixes_as_ids_do() -> None:
    """Equal ids give equal tokens up to the first different id, and the prompt has the stated length."""
    one, other = token_ids_of((3, 9), 600), token_ids_of((3, 8, 9), 1400)
    assert (len(one), len(other)) == (600, 1400)
    assert int(np.argmin(one == other[:600])) == TRACE_BLOCK_TOKENS


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    """Timestamps are milliseconds, and no more than the requested number of requests is read."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({**ROW, "timestamp": ms}) + "\n" for ms in (3000, 1500, 0)))
    assert read_trace(path, 2) == [TraceRequest(1.5, 600, 7, (3, 9)), TraceRequest(3.0, 600, 7, (3, 9))]
    assert [request.arrival_s for request in read_trace(path)] == [0.0, 1.5, 3.0]


def chosen(*flags: str) -> list[TraceRequest]:
    parser = argparse.ArgumentParser()
    add_trace_flags(parser, requests=50)
    return chosen_trace(parser.parse_args(flags))


def test_the_default_trace_comes_with_the_project() -> None:
    """The trace has the published lines, unchanged. Its source and licence are named next to them."""
    lines = gzip.decompress(DEFAULT_TRACE.read_bytes())
    assert hashlib.sha256(lines).hexdigest() == "68ce4e4b4bed6c423efce345f1e575af03d80327f05611395eedaa1065a46427"
    trace = read_trace(DEFAULT_TRACE)
    assert (len(trace), trace[0].arrival_s, trace[-1].arrival_s) == (6000, 0.0, 1872.0)
    note = DEFAULT_TRACE.with_name("README.md").read_text()
    assert DEFAULT_TRACE.name in note and "Apache-2.0" in note and "github.com/kvcache-ai/Mooncake" in note


def test_flags_choose_the_requests() -> None:
    """Flags select the default trace or a slice of it; too few requests are an error."""
    trace = read_trace(DEFAULT_TRACE)
    assert chosen() == trace[:50]
    assert chosen("--skip", "5990", "--requests", "10") == trace[5990:]
    with pytest.raises(ValueError, match="holds 6000 requests, but 6001 are needed"):
        chosen("--requests", "6001")


@pytest.mark.parametrize("change", [{"hash_ids": [1]}, {"input_length": 0}, {"timestamp": "x"}, {"hash_ids": None}])
def test_a_malformed_line_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    """The error names the file and the line."""
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, **change}) + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read_trace(path)
