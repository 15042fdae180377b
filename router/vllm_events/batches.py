"""vLLM's KV events: their wire format, and the blocks that they tell of by this project's hashes (``Chains``).

A batch is [ts, events, data_parallel_rank]. Unknown fields are ignored. SGLang publishes the same form. Older versions
of both send arrays instead of maps. Source: vLLM's ``distributed/kv_events.py``.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec

BlockHash: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)] | int
"""vLLM's name of a block: the 32 bytes of a SHA-256, or 64 bits of it if vLLM truncates hashes."""

TokenId = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]

SEQUENCE_BYTES = 8
"""The size of a batch's number: signed, big-endian, in its own frame. An engine's batches are numbered from 0."""

MAX_SEQUENCE_BYTES = 64
"""Of that frame: newer versions have 16 bytes behind the number that name the engine's process."""

END_OF_REPLAY = -1
"""The number after the last batch of a replay."""


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class MalformedBatch(ValueError):
    """The bytes are not a batch of KV events, or an event in it is unknown or incomplete."""


class BlockStored(msgspec.Struct, frozen=True, tag="BlockStored"):
    """A row of blocks, each the parent of the next. ``parent_block_hash``: the first one's parent (None: a new chain).

    ``token_ids``: of all the blocks. ``extra_keys``: each block's hash inputs besides tokens and parent, untagged:
    the adapter's name, the salt (in a chain's first block only), and identifiers of images and embeddings.
    ``lookahead_token_ids``: for each block, the tokens after it that its hash covers too; None if hashes cover none.
    ``cache_salt``: of the whole chain, in place of extra keys (SGLang). ``origin``: "REUSED" for blocks that were
    stored before and are told again.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[TokenId]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    lookahead_token_ids: list[list[TokenId]] | None = None
    cache_salt: str | None = None
    origin: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved"):
    """One copy of each of these blocks was removed."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """Every block was removed."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one engine step. ``ts``: seconds since 1970, by the engine's clock."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


class _StoredArray(msgspec.Struct, frozen=True, tag="BlockStored", array_like=True):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[TokenId]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class _RemovedArray(msgspec.Struct, frozen=True, tag="BlockRemoved", array_like=True):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, frozen=True, tag="AllBlocksCleared", array_like=True):
    pass


class _ArrayBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


_decode = msgspec.msgpack.Decoder(KvEventBatch).decode
_decode_arrays = msgspec.msgpack.Decoder(_ArrayBatch).decode
_AS_MAP = {_StoredArray: BlockStored, _RemovedArray: BlockRemoved, _ClearedArray: AllBlocksCleared}


def decode_batch(payload: bytes) -> KvEventBatch:
    """Decode a payload. Raises MalformedBatch with the error and its position."""
    try:
        return _decode(payload)
    except UNREADABLE as error:
        with suppress(*UNREADABLE):
            batch = _decode_arrays(payload)
            events = [msgspec.convert(one, _AS_MAP[type(one)], from_attributes=True) for one in batch.events]
            return KvEventBatch(batch.ts, events, batch.data_parallel_rank)
        raise MalformedBatch(f"not a batch [ts, events, data_parallel_rank] of known events: {error}") from error


@dataclass(slots=True)
class HeldBlock:
    """``under``: the parent's hash, or the root for a first block. ``root``: of a scope that begins here, or b"".

    ``row``: consecutive held blocks up to this one, capped at the needed number, which a chain's first block satisfies.
    ``hits``: requests that used a prefix that ends here, as of ``used_s``. Older requests count less.
    """

    under: bytes
    root: bytes
    token_bytes: bytes
    used_s: float
    theirs: BlockHash
    row: float = 0
    hits: float = 0.0


class Chains(dict[bytes, HeldBlock]):
    """A group's blocks by hash. ``needed``: the blocks of a window, or infinity without one: all back to the beginning.

    ``touched`` gets the blocks with a changed row or presence. Change the mapping only by ``add``, ``drop``, ``clear``.
    """

    def __init__(self, needed: float, touched: dict[bytes, None]) -> None:
        super().__init__()
        self.needed = needed
        self._touched = touched
        self._children: dict[bytes, set[bytes]] = {}

    def add(self, block: bytes, entry: HeldBlock) -> None:
        """Add a block that was not held."""
        above = self.get(entry.under)
        first = entry.under == entry.root
        entry.row = self.needed if first else min(self.needed, 1 if above is None else above.row + 1)
        self[block] = entry
        self._touched[block] = None
        self._children.setdefault(entry.under, set()).add(block)
        self._recount(block, entry.row)

    def drop(self, block: bytes) -> None:
        """Remove a held block."""
        under = self.pop(block).under
        self._touched[block] = None
        self._children[under].discard(block)
        if not self._children[under]:
            del self._children[under]
        self._recount(block, 0)

    def clear(self) -> None:
        """Remove all blocks."""
        super().clear()
        self._children.clear()

    def serves(self, block: bytes) -> bool:
        """Return whether a prompt can continue behind a block."""
        entry = self.get(block)
        return entry is not None and entry.row == self.needed

    def _recount(self, block: bytes, row: float) -> None:
        """Update the rows of the descendants of a block with the row length ``row``."""
        below = [(block, row)]
        for parent, above in below:
            for child in self._children.get(parent, ()):
                entry, longer = self[child], min(self.needed, above + 1)
                if entry.row != longer:
                    entry.row = longer
                    self._touched[child] = None
                    below.append((child, longer))
