"""Requests to replay, in order of arrival, from a published trace of block ids or another one."""

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.common.report import BenchmarkError
from router.protocol.block_hash import TokenArray
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest, read_trace
from serve_app.request_files import numbered_lines
from serve_app.traffic.prompts import traced_prompts
from serve_app.traffic.reader import read_traffic

DEFAULT_TRACE = Path(__file__).parents[1] / "traces" / "mooncake_conversation.jsonl.gz"
"""The first 6,000 requests of Mooncake's trace (``benchmarks/traces/README.md``)."""


def token_ids_of(hash_ids: Sequence[int], prompt_tokens: int, block_size: int = TRACE_BLOCK_TOKENS) -> TokenArray:
    """Return artificial token ids: each block repeats its id."""
    return np.repeat(np.asarray(hash_ids, dtype="<i4"), block_size)[:prompt_tokens]


FORMS = "JSON lines, gzipped or plain (default: the first 6,000 requests of the published trace)"


def add_trace_flags(parser: argparse.ArgumentParser, requests: int, forms: str = FORMS) -> None:
    """Add the flags that ``chosen_trace`` reads. ``requests``: their default number; ``forms``: of the trace."""
    parser.add_argument("--trace", default=str(DEFAULT_TRACE), help=forms)
    parser.add_argument("--requests", type=int, default=requests)
    parser.add_argument("--skip", type=int, default=0, help="number of requests to skip at the start of the trace")
    parser.add_argument("--seed", type=int, default=0)


def chosen_trace(options: argparse.Namespace) -> list[TraceRequest]:
    """Return the requests that the flags select. Raises BenchmarkError if the trace has fewer."""
    needed = options.skip + options.requests
    trace = _requests_of(Path(options.trace), needed)
    if len(trace) < needed:
        raise BenchmarkError(f"{options.trace} holds {len(trace)} requests, but {needed} are needed")
    return trace[options.skip :]


def _requests_of(path: Path, needed: int) -> list[TraceRequest]:
    """Return the first requests of recorded traffic, in blocks of a trace's size, or of a trace. Raises TraceError."""
    _, first = next(numbered_lines(path), (0, b""))
    if b'"warmpath_traffic"' in first:
        return list(islice(traced_prompts(read_traffic([path], block_tokens=TRACE_BLOCK_TOKENS)), needed))
    return read_trace(path, needed)
