"""The workload of `benchmarks routing`; a block's hash is 16 random bytes."""

import gc
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import quantiles

from router.settings import DEFAULTS

BLOCK_SIZE = DEFAULTS.block_size
PROMPT_TOKENS = 10_007
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
HOLDERS = 3
BLOCKS_A_MESSAGE = 128


@dataclass(frozen=True, slots=True)
class RoutingWorkload:
    """Prompts of 625 blocks, each held by three replicas; a query shares a prefix of random depth with one prompt."""

    replicas: int
    blocks: int
    decisions: int = 5000
    seed: int = 0

    def names(self) -> list[str]:
        """Return the replicas' ids."""
        return [f"replica-{number:04d}" for number in range(self.replicas)]

    def prompts(self) -> Iterator[tuple[bytes, list[str]]]:
        """Yield (packed chain, holders), recomputed each time to save memory."""
        rng = Random(self.seed)
        names = self.names()
        for _ in range(self.blocks // PROMPT_BLOCKS):
            yield rng.randbytes(16 * PROMPT_BLOCKS), rng.sample(names, HOLDERS)

    def queries(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (packed chain, placement key)."""
        rng = Random(self.seed + 1)
        chains = [chain for chain, _ in self.prompts()]
        for _ in range(self.decisions):
            shared = 16 * rng.randrange(PROMPT_BLOCKS + 1)
            yield rng.choice(chains)[:shared] + rng.randbytes(16 * PROMPT_BLOCKS - shared), rng.randbytes(16)


def messages_of(chain: bytes) -> list[bytes]:
    """Cut a chain into pieces of at most ``BLOCKS_A_MESSAGE`` blocks, like the messages of replicas."""
    size = 16 * BLOCKS_A_MESSAGE
    return [chain[start : start + size] for start in range(0, len(chain), size)]


def figures(workload: RoutingWorkload, taken_s: list[float], spent_s: float, grown_bytes: int) -> dict[str, float]:
    """Return figures from the seconds of each decision, the seconds of all events, and their memory."""
    percents = quantiles(taken_s, n=100, method="inclusive")
    blocks = workload.blocks // PROMPT_BLOCKS * PROMPT_BLOCKS
    return {
        "decision_us_p50": 1e6 * percents[49],
        "decision_us_p99": 1e6 * percents[98],
        "bytes_per_block": grown_bytes / blocks,
        "events_blocks_s": HOLDERS * blocks / spent_s,
    }


def resident_bytes() -> int:
    """Return this process's resident memory (Linux), after a garbage collection."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def serve(measure: Callable[[RoutingWorkload], dict[str, float]]) -> None:
    """Run as a process of its own: read the workload, measure, print the figures."""
    print(json.dumps(measure(RoutingWorkload(**json.load(sys.stdin)))))
