"""What holds of every request inside the engine."""

from __future__ import annotations

from router.protocol.block_hash import HASH_BYTES
from serve_app.engine.scheduling.sequence import SequenceState


def assert_laws(sequence: SequenceState, block_size: int) -> None:
    """The counters fit together, between two steps."""
    prompt, most = sequence.prompt_tokens, sequence.prompt_tokens + sequence.request.sampling.max_tokens
    assert prompt <= sequence.prefill_tokens <= sequence.length <= most, "prompt <= prefill <= length <= most"
    assert 0 <= sequence.computed <= sequence.length, "computed <= length"
    assert sequence.farthest <= sequence.length, "farthest <= length"
    assert sequence.drafted is None or sequence.drafted <= sequence.computed, "drafted <= computed"
    assert 0 <= sequence.published <= sequence.computed // block_size <= len(sequence.blocks), (
        "published <= computed <= blocks"
    )
    assert 0 <= sequence.resolved <= sequence.computed // block_size, "resolved <= computed"
    assert sequence.held_blocks_hint <= len(sequence.chain) // HASH_BYTES, "a hint beyond the chain"
    assert sequence.reserved_blocks >= 0, "fewer than no blocks are reserved"
    if not sequence.blocks:
        assert sequence.computed == sequence.reserved_blocks == 0, "KV or a reservation without blocks"
        assert not sequence.beyond_reservation, "beyond a reservation without blocks"
