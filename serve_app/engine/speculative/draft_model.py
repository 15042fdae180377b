"""A smaller model of the same vocabulary as drafter: it decodes ahead of the base, over the same block ids.

Sampled drafts use the request's own sampling values and the random number of their position, as the base will: the
closer the two models, the likelier both choose the same token. A draft model that fails on a sequence only stops
drafting for it.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from msgspec import structs

from router.protocol.block_hash import TokenArray
from serve_app.engine.runner.model_runner import ModelRunner
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Segment, SegmentResult

ROWS_AT_MOST = 8
"""Up to this many unread tokens enter as decode rows, which cost less than a prefill part of that length."""


class DraftModel:
    """Drafts with a model of the base's vocabulary and, at least, its positions."""

    def __init__(self, base: ModelRunner, settings: EngineSettings) -> None:
        """Load ``settings.speculative_model`` in the dtype of ``base``."""
        dtype = str(base.dtype).removeprefix("torch.")
        self.runner = ModelRunner(settings.speculative_model, replace(settings, dtype=dtype))
        self.pools = self.runner.pools

    def propose(self, segments: Sequence[Segment]) -> list[list[int]]:
        """Decode ``drafts`` tokens ahead of each segment, all segments together, one step a token."""
        proposals: list[list[int]] = [[] for _ in segments]
        active = [i for i, segment in enumerate(segments) if segment.drafts]
        while active:
            parts = [_drafting(segments[i], proposals[i]) for i in active]
            results = iter(self.runner.execute([part for own in parts for part in own]))
            going_on = []
            for i, own in zip(active, parts, strict=True):
                *_, last = islice(results, len(own))
                if last.token is not None:
                    proposals[i].append(last.token)
                    if len(proposals[i]) < segments[i].drafts:
                        going_on.append(i)
            active = going_on
        return proposals

    def follow(
        self, segments: Sequence[Segment], results: Sequence[SegmentResult], proposals: Sequence[Sequence[int]]
    ) -> list[int]:
        """Read on wherever the base completed a block, in one step; elsewhere the draft model may lag behind."""
        size = self.runner.pool.block_size
        drafted: list[int] = []
        batch: list[Segment] = []
        for segment, result, drafts in zip(segments, results, proposals, strict=True):
            tokens, first = _unread(segment)
            computed = segment.end + len(result.accepted)
            # The last draft was proposed and not read; what follows the first wrong one is void.
            done = segment.start + min(len(result.accepted) + 1, len(drafts)) if drafts else first
            if not result.error and computed // size > done // size:
                known = np.append(tokens, np.array(result.accepted, dtype=np.int32))
                batch.extend(_parts(segment, known[done - first :], done))
                done = computed
            drafted.append(done)
        if batch:
            self.runner.execute(batch)
        return drafted


def _unread(segment: Segment) -> tuple[TokenArray, int]:
    """Return the tokens that the draft model has not read, the segment's own included, and the first one's position."""
    behind = segment.token_ids[:0] if segment.behind is None else segment.behind
    return np.append(behind, segment.token_ids), segment.start - len(behind)


def _drafting(segment: Segment, drafts: Sequence[int]) -> list[Segment]:
    """Return what the draft model reads to propose what comes after ``drafts``, under the same rules of sampling."""
    history = segment.history
    if drafts:
        parts = _parts(segment, np.array(drafts[-1:], dtype=np.int32), segment.start + len(drafts))
        history = history.guess(drafts) if history is not None else None
    else:
        parts = _parts(segment, *_unread(segment))
    assert segment.sampling is not None
    parts[-1] = structs.replace(parts[-1], sampling=replace(segment.sampling, logprobs=None), history=history)
    return parts


def _parts(segment: Segment, tokens: TokenArray, start: int) -> list[Segment]:
    """Return ``tokens`` from position ``start`` as new segments, without an adapter, which is the base's alone."""
    rows = [tokens] if len(tokens) > ROWS_AT_MOST else [tokens[i : i + 1] for i in range(len(tokens))]
    return [Segment(row, start + i, segment.blocks, segment.runs, None) for i, row in enumerate(rows)]
