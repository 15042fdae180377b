"""Whether a prompt is worth caching: its length against a block, and its reads against what writing it costs."""

SHORT_TOKENS = 100
"""Prompts below this gain too little. Source: the best practices of TensorRT Edge-LLM's system prompt cache."""


def too_short(tokens: int, block_size: int) -> str:
    """Return advice on a prompt of this many tokens, "" for one that is long enough."""
    if tokens < block_size:
        return (
            f"{tokens} tokens are less than a block of {block_size}, so it is never cached by itself: leave it out of "
            "the versions to warm, or put more of what stays before what changes."
        )
    if tokens < SHORT_TOKENS:
        return (
            f"{tokens} tokens are too short to be worth caching: below about {SHORT_TOKENS}, computing them takes as "
            "long as finding them."
        )
    return ""


def too_few_reads(reads: int, writes: int, break_even_reads: float | None) -> str:
    """Return advice on a prompt that was written so often, and read so often, "" while caching pays.

    ``break_even_reads``: of a written token by the model's price; None: there is no price, or no saving.
    """
    if break_even_reads is None or not writes or reads / writes >= break_even_reads:
        return ""
    return (
        f"each write of it was read {reads / writes:.2g} times, and pays from {break_even_reads:.2g}: it is asked for "
        "too rarely to stay in the cache, or something before it changes."
    )
