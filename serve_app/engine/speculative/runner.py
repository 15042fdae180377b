"""Speculative decoding: a drafter proposes tokens, one step of the base model verifies all of them.

A draft counts only if it equals the token that the base samples at its position, whose random number depends on
(seed, position) alone. The output is therefore that of plain decoding at every temperature; the drafter decides only
how many base steps it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from msgspec.structs import replace as replace_parts

from serve_app.cache.kv_chain import Row
from serve_app.engine.attention.paging import KvPool
from serve_app.engine.runner.kv_copy import copy_in, copy_out, kv_part
from serve_app.engine.runner.model_runner import ModelRunner
from serve_app.engine.settings import EngineSettings
from serve_app.engine.speculative.draft_model import DraftModel
from serve_app.engine.speculative.eagle_config import read_eagle_config
from serve_app.engine.speculative.eagle_drafter import EagleDrafter
from serve_app.engine.speculative.eagle_head import load_head
from serve_app.engine.step import Segment, SegmentResult


class Drafter(Protocol):
    """Proposes tokens. What it keeps of sequences lies in ``pools`` under the same block ids as the base's KV."""

    block_bytes: int
    pools: Sequence[torch.Tensor]
    """[layers, planes, blocks, ...] each; saved, reused, evicted and exported with the base's pool."""

    def propose(self, segments: Sequence[Segment]) -> list[list[int]]:
        """Return up to ``drafts`` tokens for each segment, to come after its own."""

    def follow(
        self, segments: Sequence[Segment], results: Sequence[SegmentResult], proposals: Sequence[Sequence[int]]
    ) -> list[int]:
        """Learn what the base accepted; return how many positions of each sequence have valid draft KV now.

        Afterwards every block whose base KV is complete has complete draft KV.
        """


class SpeculativeRunner:
    """A base model's runner and a drafter, as one runner."""

    kind = "torch"

    def __init__(self, base: ModelRunner, drafter: Drafter, drafter_fingerprint: str = "") -> None:
        self.base = base
        self.drafter = drafter
        self.pool = base.pool
        self.adapters = base.adapters
        self.pools = (base.pool.tensor, *drafter.pools)
        self.vocab_size = base.vocab_size
        self.max_positions = base.max_positions
        self.block_bytes = base.block_bytes + drafter.block_bytes
        drafted = (kv_part(pool, drafter_fingerprint) for pool in drafter.pools)
        self.kv_format = replace_parts(base.kv_format, parts=(*base.kv_format.parts, *drafted))

    def read_blocks(self, blocks: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy each block's KV, the drafter's after the base's, into its row."""
        copy_out(self.pools, blocks, rows)

    def write_blocks(self, blocks: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy rows into blocks: the inverse of ``read_blocks``."""
        copy_in(self.pools, blocks, rows)

    def execute(self, segments: Sequence[Segment]) -> list[SegmentResult]:
        """Draft, verify, and let the drafter follow; results carry ``accepted``, ``proposed`` and ``drafted``."""
        proposals = self.drafter.propose(segments)
        rows = [row for pair in zip(segments, proposals, strict=True) for row in verification_rows(*pair)]
        verdicts = iter(self.base.execute(rows))
        results, spoiled = [], []
        for i, drafts in enumerate(proposals):
            mine = [next(verdicts) for _ in range(len(drafts) + 1)]
            results.append(accept(mine, drafts))
            if drafts and any(verdict.error for verdict in mine):
                spoiled.append(i)
        if spoiled:
            self._redo(segments, proposals, results, spoiled)
        drafted = self.drafter.follow(segments, results, proposals)
        return [replace(result, drafted=positions) for result, positions in zip(results, drafted, strict=True)]

    def _redo(
        self,
        segments: Sequence[Segment],
        proposals: list[list[int]],
        results: list[SegmentResult],
        spoiled: Sequence[int],
    ) -> None:
        """Decode ``spoiled`` segments again without drafts: a guess whose KV is no number must harm nobody.

        (Its position is masked out for the rows before it, but zero times NaN is NaN.)
        """
        for i in spoiled:
            erase(self.pool, segments[i], len(proposals[i]))
        plain = self.base.execute([replace(segments[i], drafts=0) for i in spoiled])
        for i, result in zip(spoiled, plain, strict=True):
            results[i] = result
            proposals[i] = []


def verification_rows(segment: Segment, drafts: Sequence[int]) -> list[Segment]:
    """Return a segment, or with ``drafts`` its token and each of them as decode rows over the same blocks.

    A step writes the KV of all its rows before any of them attends, so row i sees the drafts before it; and rows
    of one sequence share their reads of long runs.
    """
    if not drafts:
        return [segment]
    ids = np.array([segment.token_ids[-1], *drafts], dtype=np.int32)
    history = segment.history
    return [
        replace(
            segment,
            token_ids=ids[i : i + 1],
            start=segment.start + i,
            drafts=0,
            history=history.guess(drafts[:i]) if history is not None and i else history,
        )
        for i in range(len(drafts) + 1)
    ]


def accept(verdicts: Sequence[SegmentResult], drafts: Sequence[int]) -> SegmentResult:
    """Return the result of a verified segment: the leading drafts that equal the base's tokens, and its next one."""
    right = 0
    while right < len(drafts) and verdicts[right].token == drafts[right]:
        right += 1
    logprobs = tuple(chain.from_iterable(verdict.logprobs for verdict in verdicts[: right + 1]))
    return replace(verdicts[right], accepted=tuple(drafts[:right]), proposed=len(drafts), logprobs=logprobs)


def erase(pool: KvPool, segment: Segment, count: int) -> None:
    """Zero the KV of the ``count`` positions after ``segment``."""
    for position in range(segment.end, segment.end + count):
        pool.tensor[:, :, segment.blocks[position // pool.block_size], position % pool.block_size].zero_()


def load_speculative(model_path: str | Path, settings: EngineSettings) -> SpeculativeRunner:
    """Load a base model and ``settings.speculative_model``, its drafter: another model, or an EAGLE-3 head.

    Raises ValueError when the two do not fit, and what ``ModelRunner`` raises.
    """
    head = read_eagle_config(Path(settings.speculative_model))
    base = ModelRunner(model_path, settings)
    if head is not None:
        head.check_fits(Path(model_path), base.config.to_dict())
        drafter = EagleDrafter(base, load_head(head, base.model, base.dtype, base.device))
        return SpeculativeRunner(base, drafter, settings.speculative_fingerprint)
    draft = ModelRunner(settings.speculative_model, replace(settings, dtype=str(base.dtype).removeprefix("torch.")))
    if draft.vocab_size != base.vocab_size:
        raise ValueError(
            f"{settings.speculative_model} has {draft.vocab_size} tokens and cannot draft for {model_path}, which has "
            f"{base.vocab_size}: both must have the same vocabulary"
        )
    wanted = min(settings.max_model_len, base.max_positions)
    if draft.max_positions < wanted:
        raise ValueError(
            f"{settings.speculative_model} takes {draft.max_positions} positions, fewer than the {wanted} of "
            f"{model_path}: set max_model_len={draft.max_positions}"
        )
    return SpeculativeRunner(base, DraftModel(draft), settings.speculative_fingerprint)
