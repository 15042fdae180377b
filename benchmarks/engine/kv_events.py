"""Cost of vLLM's KV events per 1,000 tokens: read from msgpack, and put under this project's hashes. No vllm needed.

Each batch is a step of a full pool: it stores one prompt's blocks and removes as many, one event a block, as vLLM does.
Least CPU time of several rounds; token ids are drawn from 128,000.
`python -m benchmarks kv_events --json FILE`
"""

from __future__ import annotations

import time
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.report import parser_of, write
from serve_app.engine.vllm.events.batches import decode_batch
from serve_app.engine.vllm.events.translator import Translator

_VOCABULARY = 128_000


def payloads_of(batches: int, blocks: int, block_size: int, seed: int = 7) -> list[bytes]:
    """Return batches in which each prompt takes the place of the one before."""
    generator = np.random.default_rng(seed)
    made: list[bytes] = []
    before: list[bytes] = []
    for number in range(batches):
        hashes = [sha256(f"{number}.{block}".encode()).digest() for block in range(blocks)]
        stored = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": generator.integers(0, _VOCABULARY, blocks * block_size).tolist(),
            "block_size": block_size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [("a1" * 16,), *[None] * (blocks - 1)],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        removed = [
            {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0}
            for name in reversed(before)
        ]
        made.append(msgspec.msgpack.encode([1.0, [*removed, stored], 0]))
        before = hashes
    return made


def cost(payloads: list[bytes], blocks: int, block_size: int) -> tuple[float, float]:
    """Return the seconds of CPU that decoding and translating all of them take."""
    started_s = time.thread_time()
    batches = [decode_batch(payload) for payload in payloads]
    decoded_s = time.thread_time()
    translator = Translator(block_size, blocks)
    for batch in batches:
        translator.translate(batch)
    translated_s = time.thread_time()
    assert translator.num_blocks == blocks and not translator.counts.restarts
    return decoded_s - started_s, translated_s - decoded_s


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="of each batch")
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for block_size in (16, 32, 128):
        blocks = arguments.tokens // block_size
        payloads = payloads_of(arguments.batches, blocks, block_size)
        rounds = [cost(payloads, blocks, block_size) for _ in range(arguments.rounds)]
        thousands = blocks * block_size * arguments.batches / 1000
        decode_s, translate_s = (min(times) for times in zip(*rounds, strict=True))
        rows.append(
            {
                "block_size": block_size,
                "decode_us": 1e6 * decode_s / thousands,
                "translate_us": 1e6 * translate_s / thousands,
                "bytes_a_token": sum(map(len, payloads)) / thousands / 1000,
            }
        )
    said = "; ".join(
        f"blocks of {row['block_size']}: {row['decode_us']:.0f} + {row['translate_us']:.0f} us" for row in rows
    )
    write(
        arguments.json,
        vars(arguments),
        rows,
        f"CPU time to decode + translate per 1,000 tokens, least of the rounds: {said}.",
    )


if __name__ == "__main__":
    main()
