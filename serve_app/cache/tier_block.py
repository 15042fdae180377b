"""What a lower tier knows of one block, besides its bytes.

Owns the record that spilled blocks, files and loads share. Knows nothing of where the bytes are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierBlock:
    """A block's name, the lineage that it is verified by, and what a file's header says of it besides.

    ``scope``: the scope's digest.
    """

    block_hash: bytes
    lineage: bytes
    scope: bytes
    lora: str
    token_bytes: bytes
