"""Laws of an engine's KV events that routers rely on, checked batch by batch from the first one.

numbers: batches count up by one. parent: a stored block begins a chain or has a held parent. content: a hash and its
parent, tokens, lookahead, extra keys determine each other. removed: only held blocks are removed, one copy at a time.
no_holes: a block is removed after its children. room: the pool never holds more copies than it has blocks.
"""

from collections import Counter

from router.vllm_events.batches import BlockHash, BlockRemoved, BlockStored, decode_batch

Content = tuple[BlockHash | None, tuple[int, ...], str]


class BrokenLaw(AssertionError):
    """An event broke a law; the message names the law and the batch."""


class Checker:
    """Reads one stream. ``kinds``: events of each kind so far; ``duplicates``: blocks stored as copies."""

    def __init__(self, num_blocks: int) -> None:
        self.kinds: Counter[str] = Counter()
        self.duplicates = 0
        self._num_blocks = num_blocks
        self._batches = 0
        self._copies: Counter[BlockHash] = Counter()
        self._parent: dict[BlockHash, BlockHash | None] = {}
        self._content: dict[BlockHash, Content] = {}
        self._hash_of: dict[Content, BlockHash] = {}

    def batch(self, number: int, payload: bytes) -> None:
        """Check the next batch. Raises BrokenLaw."""
        self._hold(number == self._batches, "numbers", f"{number} after {self._batches} batches")
        self._batches += 1
        for event in decode_batch(payload).events:
            self.kinds[type(event).__name__] += 1
            if isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved):
                self._removed(event)
            else:
                self._copies.clear()

    def _hold(self, holds: bool, law: str, sentence: str) -> None:
        if not holds:
            raise BrokenLaw(f"{law}, batch {self._batches - 1}: {sentence}")

    def _stored(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        self._hold(parent is None or self._copies[parent] > 0, "parent", f"{parent!r} is not held")
        for index, name in enumerate(event.block_hashes):
            keys = event.extra_keys[index] if event.extra_keys else None
            ahead = event.lookahead_token_ids[index] if event.lookahead_token_ids else None
            tokens = tuple(event.token_ids[index * size : (index + 1) * size])
            content = (parent, tokens, repr((event.lora_name, keys, ahead)))
            same = self._content.setdefault(name, content), self._hash_of.setdefault(content, name)
            self._hold(same == (content, name), "content", f"{name!r} stood for something else, or another hash for it")
            self.duplicates += self._copies[name] > 0
            self._copies[name] += 1
            self._parent[name] = parent
            parent = name
        held = self._copies.total()
        self._hold(held <= self._num_blocks, "room", f"{held} copies in {self._num_blocks} blocks")

    def _removed(self, event: BlockRemoved) -> None:
        for name in event.block_hashes:
            self._hold(self._copies[name] > 0, "removed", f"{name!r} is not held")
            self._copies[name] -= 1
            orphans = [held for held, copies in self._copies.items() if copies and self._parent[held] == name]
            self._hold(self._copies[name] > 0 or not orphans, "no_holes", f"{name!r} went before {orphans}")
