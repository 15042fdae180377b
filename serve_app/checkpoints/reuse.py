"""Recorded traces, and their hit rates by cache size, from the LRU stack distances of their blocks.

Exact for a single LRU cache of whole blocks that evicts the ends of prompts first.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from serve_app.request_files import TraceError, numbered_lines

TRACE_BLOCK_TOKENS = 512
"""The tokens of one id in a Mooncake trace."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """``hash_ids``: an id for each block; the last block may be partial. Equal ids mean equal prefixes."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ReuseCurve:
    """Hits by cache size. ``distances``: of blocks seen before, ascending; ``hit_tokens``: cumulative up to each."""

    requests: int
    prompt_tokens: int
    block_tokens: int
    blocks: int
    distinct_blocks: int
    distances: np.ndarray[Any, np.dtype[np.int64]]
    hit_tokens: np.ndarray[Any, np.dtype[np.int64]]

    def hit_rate(self, blocks: int | None = None) -> float:
        """Return the fraction of prompt tokens that a cache of ``blocks`` hits; None: an unlimited cache."""
        hits = self._hits(blocks)
        return int(self.hit_tokens[hits - 1]) / self.prompt_tokens if hits else 0.0

    def evictions(self, blocks: int) -> int:
        """Return the number of evicted blocks over the whole trace."""
        return self.blocks - self._hits(blocks) - min(blocks, self.distinct_blocks)

    def blocks_for(self, hit_rate: float) -> int:
        """Return the fewest blocks with that hit rate. Raises ValueError if no cache reaches it."""
        if hit_rate <= 0:
            return 0
        index = int(np.searchsorted(self.hit_tokens, hit_rate * self.prompt_tokens - 1e-6))
        if index == len(self.distances):
            raise ValueError(f"no cache hits {hit_rate:.0%} of this trace")
        return int(self.distances[index])

    def _hits(self, blocks: int | None) -> int:
        if blocks is None:
            return len(self.distances)
        return int(np.searchsorted(self.distances, blocks, side="right"))


class _Row(msgspec.Struct):
    """A line of a trace. ``timestamp``: in ms."""

    timestamp: float
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: tuple[int, ...]
    output_length: int = 1


_EXPECTED = (
    'a line of a trace is {"timestamp": MILLISECONDS, "input_length": TOKENS, "output_length": TOKENS, "hash_ids": '
    f"[...]}}, with an id for each {TRACE_BLOCK_TOKENS} tokens of input"
)
_ROWS = msgspec.json.Decoder(_Row)


def read_trace(path: Path, requests: int | None = None) -> list[TraceRequest]:
    """Read the first ``requests`` of a trace, gzipped or plain, by arrival. Raises TraceError."""
    trace: list[TraceRequest] = []
    for number, line in islice(numbered_lines(path), requests):
        try:
            row = _ROWS.decode(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}, line {number}: {error}; {_EXPECTED}") from error
        tokens, ids = row.input_length, row.hash_ids
        if len(ids) != -(-tokens // TRACE_BLOCK_TOKENS):
            raise TraceError(f"{path}, line {number}: {len(ids)} ids for {tokens} tokens; {_EXPECTED}")
        trace.append(TraceRequest(row.timestamp / 1000.0, tokens, row.output_length, ids))
    if not trace:
        raise TraceError(f"{path} holds no requests")
    return sorted(trace, key=lambda request: request.arrival_s)


def reuse_curve(prompts: Iterable[TraceRequest], block_tokens: int = TRACE_BLOCK_TOKENS) -> ReuseCurve:
    """Return the reuse curve of prompts in order of arrival. ``block_tokens``: of an id.

    A block's distance is its position from the top of the LRU stack when its prompt arrives. A prompt's first block is
    stacked last, so that hits form a prefix in a cache of any size.
    Source: Mattson et al., Evaluation Techniques for Storage Hierarchies, 1970.
    """
    requests = prompt_tokens = 0
    used: dict[int, int] = {}
    uses: list[int] = []  # the time of each block's last use, ascending: the stack, with the top last
    reused: list[tuple[int, int]] = []
    moment = 0
    for prompt in prompts:
        requests += 1
        prompt_tokens += prompt.prompt_tokens
        sizes = _block_tokens(prompt.prompt_tokens, block_tokens)
        for block, tokens in zip(prompt.hash_ids, sizes, strict=True):
            if block in used:
                reused.append((len(uses) - bisect_left(uses, used[block]), tokens))
        for block in reversed(prompt.hash_ids):
            if block in used:
                del uses[bisect_left(uses, used[block])]
            moment += 1
            used[block] = moment
            uses.append(moment)
    reused.sort()
    distances, tokens_of = np.array(reused, dtype=np.int64).reshape(-1, 2).T
    return ReuseCurve(
        requests=requests,
        prompt_tokens=prompt_tokens,
        block_tokens=block_tokens,
        blocks=moment,
        distinct_blocks=len(used),
        distances=distances,
        hit_tokens=np.cumsum(tokens_of),
    )


def _block_tokens(tokens: int, size: int) -> Iterator[int]:
    for start in range(0, tokens, size):
        yield min(size, tokens - start)
