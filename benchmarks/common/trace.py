"""Requests to replay, in order of arrival, from a published trace of block ids or another one."""

import argparse
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common.report import BenchmarkError
from router.protocol.block_hash import TokenArray

DEFAULT_TRACE = Path(__file__).parents[1] / "traces" / "mooncake_conversation.jsonl.gz"
"""The first 6,000 requests of Mooncake's trace (``benchmarks/traces/README.md``)."""
TRACE_BLOCK_TOKENS = 512
"""Tokens for each id of the published trace."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. ``hash_ids``: an id for each block of the prompt; the last block may be partial."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    tenant: str = ""


def token_ids_of(hash_ids: Sequence[int], prompt_tokens: int, block_size: int = TRACE_BLOCK_TOKENS) -> TokenArray:
    """Return artificial token ids: each block repeats its id."""
    return np.repeat(np.asarray(hash_ids, dtype="<i4"), block_size)[:prompt_tokens]


def read_trace(path: Path, requests: int | None = None) -> list[TraceRequest]:
    """Read the first ``requests`` of a trace, gzipped or plain. Raises BenchmarkError at a malformed line, OSError."""
    found: list[TraceRequest] = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines, 1):
            if requests is not None and len(found) >= requests:
                break
            try:
                row = json.loads(line)
                ids = tuple(int(value) for value in row["hash_ids"])
                request = TraceRequest(
                    row["timestamp"] / 1000.0, int(row["input_length"]), int(row["output_length"]), ids
                )
            except (ValueError, KeyError, TypeError) as error:
                raise BenchmarkError(f"{path}, line {number}: {error!r}") from error
            if request.prompt_tokens < 1 or len(ids) != -(-request.prompt_tokens // TRACE_BLOCK_TOKENS):
                raise BenchmarkError(f"{path}, line {number}: {len(ids)} ids for {request.prompt_tokens} tokens")
            found.append(request)
    if not found:
        raise BenchmarkError(f"{path} holds no requests")
    return sorted(found, key=lambda request: request.arrival_s)


def add_trace_flags(parser: argparse.ArgumentParser, requests: int) -> None:
    """Add the flags that ``chosen_trace`` reads; ``requests``: the default number of requests."""
    known = "JSON lines, gzipped or plain (default: the first 6,000 requests of the published trace)"
    parser.add_argument("--trace", default=str(DEFAULT_TRACE), help=known)
    parser.add_argument("--requests", type=int, default=requests)
    parser.add_argument("--skip", type=int, default=0, help="number of requests to skip at the start of the trace")
    parser.add_argument("--seed", type=int, default=0)


def chosen_trace(options: argparse.Namespace) -> list[TraceRequest]:
    """Return the requests that the flags select. Raises BenchmarkError if the trace has fewer."""
    wanted = options.skip + options.requests
    found = read_trace(Path(options.trace), wanted)
    if len(found) < wanted:
        raise BenchmarkError(f"{options.trace} holds {len(found)} requests, but {wanted} are needed")
    return found[options.skip :]
