"""Who gives way when a running sequence needs a block and the pool has none to give.

Owns the choice and what a start is promised. Knows nothing of queues. Whenever a sequence starts it is promised as many
tokens as it has generated, at least ``PROMISED_TOKENS``. Up to there only one that came before it can make it give way,
beyond that anyone: so the first to arrive gives way at most once each time its answer doubles, and all get to an end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from serve_app.engine.sequence import Sequence

PROMISED_TOKENS = 64
"""Generated tokens that every start has room for, where no more were generated before it."""


def promised_blocks(sequence: Sequence, block_size: int, *, worst_case: bool) -> int:
    """Return the blocks, those it hits included, that a sequence has to be promised before it starts."""
    most = sequence.most_tokens
    if not worst_case:
        most = min(most, sequence.prefill_tokens + max(sequence.generated_tokens, PROMISED_TOKENS))
    return -(-most // block_size)


def who_gives_way(grower: Sequence, running: Iterable[Sequence], over_share: Callable[[str], float]) -> Sequence:
    """Return which of the ``running`` sequences, ``grower`` among them, gives its blocks back.

    The latest arrival of the tenant most over its share (``over_share``: 0.0 for those within). Spared are those that
    came before ``grower`` and have taken no more than was promised to them.
    """
    able = (s for s in running if s is grower or s.beyond_promise or s.number > grower.number)
    return max(able, key=lambda sequence: (over_share(sequence.request.tenant), sequence.number))
