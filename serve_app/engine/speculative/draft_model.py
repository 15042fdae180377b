"""A smaller model of the same vocabulary as drafter: it decodes ahead of the base, over the same block ids.

Sampled drafts use the request's own sampling values and the random number of their position, as the base will: the
closer the two models, the likelier both choose the same token. A draft model that fails on a sequence only stops
drafting for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from router.protocol.block_hash import TokenArray
from serve_app.engine.runner.model_runner import ModelRunner
from serve_app.engine.step import Segment, SegmentResult

ROWS_AT_MOST = 8
"""Up to this many unread tokens enter as decode rows, which cost less than a prefill part of that length."""


class DraftModel:
    """Drafts with a model; satisfies ``speculative.Drafter``."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.pools: Sequence[torch.Tensor] = (runner.pool.tensor,)
        self.block_bytes = runner.block_bytes

    def propose(self, segments: Sequence[Segment]) -> list[list[int]]:
        """Decode ``drafts`` tokens ahead of each segment, all segments together, one step a token."""
        proposals: list[list[int]] = [[] for _ in segments]
        active = [i for i, segment in enumerate(segments) if segment.drafts]
        while active:
            batch: list[Segment] = []
            last: list[int] = []
            for i in active:
                segment, drafts = segments[i], proposals[i]
                if drafts:
                    unread, start = np.array(drafts[-1:], dtype=np.int32), segment.start + len(drafts)
                else:
                    unread, start = _unread(segment)
                batch.extend(_parts(segment, unread, start, wanted=True, drafts=drafts))
                last.append(len(batch) - 1)
            results = self._runner.execute(batch)
            going_on = []
            for i, row in zip(active, last, strict=True):
                token = results[row].token
                if token is not None:
                    proposals[i].append(token)
                    if len(proposals[i]) < segments[i].drafts:
                        going_on.append(i)
            active = going_on
        return proposals

    def follow(
        self, segments: Sequence[Segment], results: Sequence[SegmentResult], proposals: Sequence[Sequence[int]]
    ) -> list[int]:
        """Read on wherever the base completed a block, in one step; elsewhere the draft model may lag behind."""
        size = self._runner.pool.block_size
        drafted: list[int] = []
        batch: list[Segment] = []
        for segment, result, drafts in zip(segments, results, proposals, strict=True):
            accepted = len(result.accepted)
            computed = segment.end + accepted
            done = _first_unread(segment)
            if drafts:
                # The last draft was proposed and not read; what follows the first wrong one is void.
                done = segment.start + min(accepted + 1, len(drafts))
            if not result.error and computed // size > done // size:
                unread, start = _unread(segment, result.accepted, done)
                batch.extend(_parts(segment, unread, start, wanted=False))
                done = computed
            drafted.append(done)
        if batch:
            self._runner.execute(batch)
        return drafted


def _unread(segment: Segment, accepted: Sequence[int] = (), first: int | None = None) -> tuple[TokenArray, int]:
    """Return the tokens from position ``first`` (default: the first unread one) to the last with base KV, and it."""
    known = _first_unread(segment)
    first = known if first is None else first
    behind = () if segment.behind is None else (segment.behind,)
    tokens = np.concatenate([*behind, segment.token_ids, np.array(accepted, dtype=np.int32)])
    return tokens[first - known :], first


def _first_unread(segment: Segment) -> int:
    return segment.start - (0 if segment.behind is None else len(segment.behind))


def _parts(
    segment: Segment, tokens: TokenArray, start: int, *, wanted: bool, drafts: Sequence[int] = ()
) -> list[Segment]:
    """Return ``tokens`` from position ``start`` as the draft model's segments; the last may want a token.

    ``drafts``: what was drafted before it. New segments, not copies: an adapter or whatever else concerns the base
    alone stays behind. The rules of sampling hold for drafts too, or the base would accept few.
    """
    sampling, history = (segment.sampling, segment.history) if wanted else (None, None)
    if sampling is not None and sampling.logprobs is not None:
        sampling = replace(sampling, logprobs=None)
    if history is not None and drafts:
        history = history.guess(drafts)
    if len(tokens) > ROWS_AT_MOST:
        return [Segment(tokens, start, segment.blocks, segment.runs, sampling, history=history)]
    parts = [Segment(tokens[i : i + 1], start + i, segment.blocks, segment.runs, None) for i in range(len(tokens))]
    parts[-1] = replace(parts[-1], sampling=sampling, history=history)
    return parts
