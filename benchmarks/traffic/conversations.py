"""The shapes of the published trace's conversations: each turn's kept and new blocks, and its time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation, without its system prompt, in blocks of 512 tokens.

    ``gap_s``: since the previous turn; ``kept_blocks``: that turn's blocks at the beginning of this one.
    """

    gap_s: float
    kept_blocks: int
    new_blocks: int
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class _Conversation:
    turns: list[Turn] = field(default_factory=list)
    ids: tuple[int, ...] = ()
    asked_s: float = 0.0
    too_long: bool = False


def conversations_of(trace: Sequence[TraceRequest], max_blocks: int) -> list[tuple[Turn, ...]]:
    """Return the trace's conversations in the order of their first turns, cut before a prompt over ``max_blocks``.

    The first block, common to all prompts, is dropped. A request belongs to the latest conversation with its blocks.
    """
    conversations: list[_Conversation] = []
    of_block: dict[int, _Conversation] = {}
    for request in trace:
        ids = request.hash_ids[1:] or request.hash_ids
        conversation = next((of_block[block] for block in reversed(ids) if block in of_block), None)
        if conversation is None:
            conversation = _Conversation(asked_s=request.arrival_s)
            conversations.append(conversation)
        kept = _common(conversation.ids, ids)
        tokens = request.prompt_tokens - TRACE_BLOCK_TOKENS * (len(request.hash_ids) - len(ids))
        turn = Turn(request.arrival_s - conversation.asked_s, kept, len(ids) - kept, tokens, request.output_tokens)
        conversation.too_long = conversation.too_long or len(ids) > max_blocks
        if not conversation.too_long:
            conversation.turns.append(turn)
        conversation.ids, conversation.asked_s = ids, request.arrival_s
        of_block.update(dict.fromkeys(ids, conversation))
    return [tuple(conversation.turns) for conversation in conversations if conversation.turns]


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))
