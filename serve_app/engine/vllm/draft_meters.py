"""The worth of drafts, under vLLM's names: drafts, their tokens, accepted ones. The engine's loop writes."""

from collections import Counter
from collections.abc import Iterable

from router.protocol.samples import Labels, Sample


class DraftMeters:
    """Counters of one engine's life."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, drafts: int, draft_tokens: int, accepted_tokens: int) -> None:
        """Count a step's drafts."""
        self._counts["warmpath_spec_decode_num_drafts_total"] += drafts
        self._counts["warmpath_spec_decode_num_draft_tokens_total"] += draft_tokens
        self._counts["warmpath_spec_decode_num_accepted_tokens_total"] += accepted_tokens

    def samples(self, labels: Labels) -> Iterable[Sample]:
        """Yield the counters; nothing where nothing drafts."""
        for name, count in dict(self._counts).items():
            yield name, labels, float(count)
