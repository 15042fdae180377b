"""Write a long trace of growing conversations in Mooncake's form: `python -m benchmarks.traffic.long_trace FILE`."""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS
from serve_app.traffic.export import TraceLine

OPEN, LONGEST = 4000, 120
"""Conversations at once, and the blocks after which one ends."""


def long_trace(requests: int, seed: int = 1) -> Iterator[TraceLine]:
    """Yield requests at 20 a second, about 28 blocks each; all begin with one block."""
    rng = random.Random(seed)
    conversations: list[list[int]] = []
    fresh, at_s = 1, 0.0
    for _ in range(requests):
        at_s += rng.expovariate(20.0)
        place = rng.randrange(len(conversations)) if conversations and rng.random() < 0.55 else -1
        grown = rng.randint(1, 6) if place >= 0 else rng.choice([4, 8, 12, 16, 24, 40, 60])
        ids = [*(conversations[place] if place >= 0 else [0]), *range(fresh, fresh + grown)]
        fresh += grown
        if place < 0 and len(conversations) < OPEN:
            conversations.append(ids)
        else:
            next_one = place if place >= 0 else rng.randrange(OPEN)
            conversations[next_one] = ids if len(ids) <= LONGEST else ids[:1]
        tokens = len(ids) * TRACE_BLOCK_TOKENS - rng.randrange(TRACE_BLOCK_TOKENS)
        yield TraceLine(int(at_s * 1e3), tokens, rng.randint(1, 800), ids)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--requests", type=int, default=1_000_000)
    options = parser.parse_args()
    encoder = msgspec.json.Encoder()
    with options.file.open("wb") as file:
        for line in long_trace(options.requests):
            file.write(encoder.encode(line) + b"\n")


if __name__ == "__main__":
    main()
