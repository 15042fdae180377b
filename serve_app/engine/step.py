"""The work of one forward: tokens of sequences, over their blocks.

It is the only interface between the engine's two halves, scheduling and model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import numpy as np

from router.protocol.block_hash import TokenArray
from serve_app.cache.kv_chain import KvFormat, Row
from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.protocol import ErrorKind, SamplingParams, TokenLogprob, TokenMatcher

_log = logging.getLogger(__name__)

BlockRun = tuple[int, int]
"""(first block id, number of blocks): neighbours in a sequence that are neighbours in the pool too."""


@dataclass(slots=True, eq=False)
class Kept:
    """What the sampling rules keep of one request from step to step; only they read it."""

    rules: Any = None


@dataclass(frozen=True, slots=True)
class History:
    """``prompt`` and ``answer`` [tokens], int32, for rules and matchers; the answer's last ``guessed`` are drafts.

    ``kept`` is the same in all steps of a request.
    """

    prompt: TokenArray
    answer: TokenArray
    matcher: TokenMatcher | None = None
    guessed: int = 0
    kept: Kept = field(default_factory=Kept)

    def guess(self, drafts: Sequence[int]) -> History:
        """Return this history with ``drafts`` after the answer."""
        answer = np.concatenate([self.answer, np.array(drafts, dtype=np.int32)])
        return replace(self, answer=answer, guessed=self.guessed + len(drafts))


class Segment(msgspec.Struct):
    """A sequence's part of a step: ``token_ids`` enter at positions ``start``, ``start`` + 1, ...

    ``blocks`` and ``runs`` (the same blocks, as runs) hold the KV of positions 0 to ``end`` - 1. If ``sampling`` is
    set, the step samples the token at position ``end``. ``lora``: the adapter's key, "" for the base model.
    ``history``: None if nothing reads it. ``targets``: None, or the prompt's tokens at positions ``first_target``,
    ``first_target`` + 1, ... up to ``end`` or the prompt's end, whose log-probabilities are wanted with ``tops``
    likeliest ones.

    The step adds the sampled ``token``, if any, with its ``logprob`` if requested, and ``prompt_logprobs``, one for
    each target; or the kind of its failure, ``error``, with the reason.
    """

    token_ids: TokenArray
    start: int
    blocks: Sequence[int]
    runs: Sequence[BlockRun]
    sampling: SamplingParams | None
    lora: str = ""
    history: History | None = None
    targets: TokenArray | None = None
    first_target: int = 0
    tops: int = 0

    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: ErrorKind = ""
    message: str = ""

    @property
    def end(self) -> int:
        """Position after the segment's last token."""
        return self.start + len(self.token_ids)

    def fail(self, message: str, error: ErrorKind = "failed") -> None:
        """Note a failure: no token counts."""
        self.token, self.error, self.message = None, error, message


AdapterSlots = LoadedAdapters[Any]
"""The adapters in memory and in the batch, with the requests that still need them."""


class Runner(Protocol):
    """Runs steps: the model on a device, or a cost model of it."""

    kind: str
    """"torch" or "simulated"; a label of every sample in the stats."""
    vocab_size: int
    max_positions: int
    block_bytes: int
    kv_format: KvFormat
    """The format of KV that can be loaded here; its ``block_bytes`` is the real size of a block's content."""

    @property
    def adapters(self) -> AdapterSlots:
        """The LoRA adapters that a step may use."""

    def execute(self, segments: Sequence[Segment]) -> None:
        """Compute one step; the results are in its segments. An exception concerns the whole step."""

    def read_blocks(self, blocks: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy each block's KV into its row of ``kv_format.block_bytes`` bytes."""

    def write_blocks(self, blocks: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy rows into blocks: the inverse of ``read_blocks``."""


def ceil_div(total: int, part: int) -> int:
    """Return ``total`` / ``part``, rounded up: the number of parts that hold ``total``."""
    return -(-total // part)


def block_runs(blocks: Sequence[int]) -> list[BlockRun]:
    """Return ``blocks`` as maximal runs of ascending neighbours."""
    runs: list[BlockRun] = []
    first, count = blocks[0] if blocks else 0, 0
    for block in blocks:
        if block == first + count:
            count += 1
        else:
            runs.append((first, count))
            first, count = block, 1
    if count:
        runs.append((first, count))
    return runs


def run_step(runner: Runner, segments: Sequence[Segment]) -> None:
    """Run a step; if it raises, run each segment alone once, so that only the bad ones fail."""
    try:
        runner.execute(segments)
    except Exception as error:
        _log.warning("a step of %d sequences failed", len(segments), exc_info=True)
        if len(segments) == 1:
            segments[0].fail(f"the forward failed: {type(error).__name__}")
            return
        for segment in segments:
            run_step(runner, [segment])
