"""What speculation is worth: drafts, accepted tokens, and base steps.

Names are vLLM's suffixes under ``warmpath_``. Written by the engine's thread alone; without a drafter nothing is
counted and nothing is reported.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.protocol.samples import Labels, Sample
from serve_app.engine.step import SegmentResult


class SpeculationMeters:
    """Counters of one engine's life. A base step here is one sequence's part of a step that gave it a token."""

    def __init__(self) -> None:
        self._seen = False
        self._drafts = 0
        self._draft_tokens = 0
        self._accepted_tokens = 0
        self._base_steps = 0

    def verified(self, result: SegmentResult) -> None:
        """Count one segment's result."""
        self._seen = True
        self._base_steps += result.token is not None
        if result.proposed:
            self._drafts += 1
            self._draft_tokens += result.proposed
            self._accepted_tokens += len(result.accepted)

    def samples(self, labels: Labels) -> Iterable[Sample]:
        """Yield the counters; nothing without a drafter."""
        if not self._seen:
            return
        yield "warmpath_spec_decode_num_drafts_total", labels, float(self._drafts)
        yield "warmpath_spec_decode_num_draft_tokens_total", labels, float(self._draft_tokens)
        yield "warmpath_spec_decode_num_accepted_tokens_total", labels, float(self._accepted_tokens)
        yield "warmpath_spec_decode_base_steps_total", labels, float(self._base_steps)
