"""The worth of speculation, under vLLM's names: drafts, accepted tokens, base steps. The engine's thread writes."""

from collections import Counter
from collections.abc import Iterable

from router.protocol.samples import Labels, Sample
from serve_app.engine.step import SegmentResult


class SpeculationMeters:
    """Counters of one engine's life. A base step here is one sequence's part of a step that gave it a token."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def verified(self, result: SegmentResult) -> None:
        """Count one segment's result."""
        self.add(bool(result.proposed), result.proposed, len(result.accepted))
        self._counts["warmpath_spec_decode_base_steps_total"] += result.token is not None

    def add(self, drafts: int, draft_tokens: int, accepted_tokens: int) -> None:
        """Count drafts, of one segment or more."""
        self._counts["warmpath_spec_decode_num_drafts_total"] += drafts
        self._counts["warmpath_spec_decode_num_draft_tokens_total"] += draft_tokens
        self._counts["warmpath_spec_decode_num_accepted_tokens_total"] += accepted_tokens

    def samples(self, labels: Labels) -> Iterable[Sample]:
        """Yield the counters; nothing without a drafter."""
        for name, count in dict(self._counts).items():
            yield name, labels, float(count)
