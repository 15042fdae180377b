"""Speculative decoding: a drafter proposes tokens, one step of the base model verifies all of them.

A draft counts only if it equals the token that the base samples at its position, whose random number depends on
(seed, position) alone. The output is therefore that of plain decoding at every temperature; the drafter decides only
how many base steps it takes. A drafter's ``pools`` [layers, planes, blocks, ...] hold what it keeps of sequences, under
the block ids of the base's KV, with which it is saved, reused, evicted and exported.
"""

from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
from msgspec import structs

from serve_app.engine.attention.paging import slots_of
from serve_app.engine.runner.kv_copy import kv_part
from serve_app.engine.runner.model_runner import ModelRunner
from serve_app.engine.settings import EngineSettings
from serve_app.engine.speculative.draft_model import DraftModel
from serve_app.engine.speculative.eagle_config import read_eagle_config
from serve_app.engine.speculative.eagle_drafter import EagleDrafter
from serve_app.engine.step import Segment, SegmentResult


class SpeculativeRunner(ModelRunner):
    """A base model with a drafter, ``settings.speculative_model``: another model, or an EAGLE-3 head."""

    def __init__(self, model_path: str | Path, settings: EngineSettings) -> None:
        """Load both. Raises ValueError when the two do not fit, and what ``ModelRunner`` raises."""
        head = read_eagle_config(Path(settings.speculative_model))
        super().__init__(model_path, settings)
        self.drafter = DraftModel(self, settings) if head is None else EagleDrafter(head, self)
        self.pools = (*self.pools, *self.drafter.pools)
        self.block_bytes = sum(pool[:, :, 0].nbytes for pool in self.pools)
        drafted = (kv_part(pool, settings.speculative_fingerprint) for pool in self.drafter.pools)
        self.kv_format = structs.replace(self.kv_format, parts=(*self.kv_format.parts, *drafted))

    def execute(self, segments: Sequence[Segment]) -> list[SegmentResult]:
        """Draft, verify, and let the drafter follow; results carry ``accepted``, ``proposed`` and ``drafted``."""
        proposals = self.drafter.propose(segments)
        rows = [row for pair in zip(segments, proposals, strict=True) for row in verification_rows(*pair)]
        verdicts = iter(super().execute(rows))
        results = [accept(list(islice(verdicts, len(drafts) + 1)), drafts) for drafts in proposals]
        for i, result in enumerate(results):
            if result.error and proposals[i]:
                results[i] = self._decode_plainly(segments[i], len(proposals[i]))
                proposals[i] = []
        drafted = self.drafter.follow(segments, results, proposals)
        return [structs.replace(result, drafted=positions) for result, positions in zip(results, drafted, strict=True)]

    def _decode_plainly(self, segment: Segment, drafts: int) -> SegmentResult:
        """Decode a segment again without drafts: a guess's NaN would get through the mask, for 0 times NaN is NaN."""
        self.pool.slots[:, :, slots_of(segment, self.pool.block_size, drafts)[-drafts:]] = 0
        return super().execute([structs.replace(segment, drafts=0)])[0]


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
        structs.replace(
            segment,
            token_ids=ids[i : i + 1],
            start=segment.start + i,
            drafts=0,
            history=history.guess(drafts[:i]) if history is not None and i else history,
        )
        for i in range(len(drafts) + 1)
    ]


def accept(verdicts: Sequence[SegmentResult], drafts: Sequence[int]) -> SegmentResult:
    """Return the leading drafts that equal the base's tokens, and its next one; or the first verdict that failed."""
    failed = next((verdict for verdict in verdicts if verdict.error), None)
    if failed is not None:
        return failed
    right = 0
    while right < len(drafts) and verdicts[right].token == drafts[right]:
        right += 1
    logprobs = tuple(chain.from_iterable(verdict.logprobs for verdict in verdicts[: right + 1]))
    return structs.replace(verdicts[right], accepted=tuple(drafts[:right]), proposed=len(drafts), logprobs=logprobs)
