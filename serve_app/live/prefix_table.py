"""Which prefixes tenants' prompts began with: public prompt, system prompt, conversation; counts, never text.

A node is named by the hash of its last whole block. Each tenant has its own room, the least recently used node goes
first: what a tenant is shown does not depend on what others send. Always kept, so that whoever begins to watch sees
what was there before: it costs a few dictionary operations a request. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import xxhash

from router.protocol.block_hash import HASH_BYTES, hash_at

Kind = Literal["public", "system", "conversation"]

MAX_TENANT_NODES = 1024
MAX_TENANT_BYTES = 8 << 20
MAX_BYTES = 32 << 20
"""Of the hashes of all tenants' nodes; each has an equal part."""

NODE_BYTES = 512
"""What a node takes beside its hashes."""

FIRST_BLOCKS = 4
"""A conversation is known again by its first blocks: its later prompts begin as the earlier ones did."""


@dataclass(slots=True)
class Node:
    """One prefix. ``chain``: its block hashes from the prompt's beginning; ``parent_blocks``: those of its parent.

    ``requests``: generations that began with it; ``hits``: those of them that reused all of it.
    """

    kind: Kind
    parent: bytes
    parent_blocks: int
    chain: bytes
    label: str = ""
    requests: int = 0
    hits: int = 0
    last_used_at_s: float = 0.0
    pinned: bool = False

    @property
    def bytes(self) -> int:
        """What it takes, about."""
        return len(self.chain) + NODE_BYTES


class TenantPrefixes:
    """One tenant's nodes by key, and what all of its generations were. A parent is never older than its children."""

    def __init__(self) -> None:
        self.nodes: OrderedDict[bytes, Node] = OrderedDict()
        self.bytes = 0
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def latest(self, most: int) -> Iterator[tuple[bytes, Node]]:
        """Yield the nodes used last, parents before their children."""
        for key in reversed(self.nodes):
            if not most:
                return
            most -= 1
            yield key, self.nodes[key]

    def touch(
        self,
        kind: Kind,
        key: bytes,
        parent: bytes,
        parent_blocks: int,
        chain: bytes,
        blocks: int,
        cached_blocks: int,
        at_s: float,
    ) -> Node:
        """Note a use of a node of the chain's first ``blocks``; it may be new, or longer than before."""
        node = self.nodes.get(key)
        known_blocks = blocks
        if node is None:
            node = self.nodes[key] = Node(kind, parent, parent_blocks, chain[: blocks * HASH_BYTES])
            self.bytes += node.bytes
        else:
            self.nodes.move_to_end(key)
            node.parent, node.parent_blocks = parent, parent_blocks
            if kind == "conversation":
                # A new turn was never there: all that can be had is all of the earlier ones.
                known_blocks = min(len(node.chain) // HASH_BYTES, blocks)
                self.bytes += len(chain) - len(node.chain)
                node.chain = chain
        node.requests += 1
        node.hits += cached_blocks >= known_blocks
        node.last_used_at_s = at_s
        return node

    def shrink(self, max_bytes: int) -> None:
        """Forget the nodes used least recently until all fit."""
        while self.nodes and (self.bytes > max_bytes or len(self.nodes) > MAX_TENANT_NODES):
            self.bytes -= self.nodes.popitem(last=False)[1].bytes


class PrefixTable:
    """The rooms of all tenants. ``tenants``: how many there are."""

    def __init__(self, block_size: int, tenants: Callable[[], int]) -> None:
        self.block_size = block_size
        self.tenants = tenants
        self.rooms: OrderedDict[str, TenantPrefixes] = OrderedDict()

    def add(
        self,
        tenant: str,
        chain: bytes,
        prompt_tokens: int,
        cached_tokens: int,
        at_s: float,
        *,
        public_blocks: int = 0,
        system_tokens: int = 0,
        label: str = "",
        pinned: bool = False,
    ) -> bytes:
        """Note a generation whose first token came, and return the key of its deepest node, b"" for none.

        ``chain``: the prompt's block hashes; ``label``: the registered prompt that it begins with; ``pinned``: whether
        a save of its system prompt is kept.
        """
        room = self.rooms.get(tenant)
        if room is None:
            room = self._new_room(tenant)
        self.rooms.move_to_end(tenant)
        room.requests += 1
        room.prompt_tokens += prompt_tokens
        room.cached_tokens += cached_tokens
        size = self.block_size
        blocks, cached_blocks = len(chain) // HASH_BYTES, cached_tokens // size
        public_blocks, system_blocks = min(public_blocks, blocks), min(system_tokens // size, blocks)
        if cached_blocks >= (prompt_tokens - 1) // size:
            cached_blocks = blocks  # the last prompt token is computed whatever is cached, and its block with it
        public_key = b"p" + hash_at(chain, public_blocks - 1) if public_blocks else b""
        parent, start = public_key, public_blocks
        if system_blocks > public_blocks:
            parent, start = b"s" + hash_at(chain, system_blocks - 1), system_blocks
        deepest = parent
        # Children first: of two a parent is to be the one used later.
        if blocks > start:
            deepest = _conversation_key(room.nodes, chain, start, blocks)
            room.touch("conversation", deepest, parent, start, chain, blocks, cached_blocks, at_s)
        if parent is not public_key:
            node = room.touch("system", parent, public_key, public_blocks, chain, start, cached_blocks, at_s)
            node.pinned = node.pinned or pinned
            if label and not public_blocks:
                node.label = label
        if public_blocks:
            node = room.touch("public", public_key, b"", 0, chain, public_blocks, cached_blocks, at_s)
            if label:
                node.label = label
        if room.bytes > self._max_bytes or len(room.nodes) > MAX_TENANT_NODES:
            room.shrink(self._max_bytes)
        return deepest

    def forget_pins(self) -> None:
        """Note that no save is kept any more."""
        for room in self.rooms.values():
            for node in room.nodes.values():
                node.pinned = False

    def _new_room(self, tenant: str) -> TenantPrefixes:
        """Return a new tenant's room; those of tenants that are configured no more go."""
        room = self.rooms[tenant] = TenantPrefixes()
        while len(self.rooms) > max(1, self.tenants()):
            self.rooms.popitem(last=False)
        return room

    @property
    def _max_bytes(self) -> int:
        return min(MAX_TENANT_BYTES, MAX_BYTES // max(1, self.tenants()))


def _conversation_key(nodes: OrderedDict[bytes, Node], chain: bytes, start: int, blocks: int) -> bytes:
    """Return the key of a prompt's conversation: that of the earlier prompt with the most first blocks in common."""
    last = min(start + FIRST_BLOCKS, blocks) - 1
    for index in range(last, start - 1, -1):
        key = b"c" + hash_at(chain, index)
        if key in nodes:
            return key
    return b"c" + hash_at(chain, last)


def node_id(tenant: str, key: bytes) -> str:
    """Return what a node is called outside: 16 hex digits; public ones are the same for every tenant."""
    owner = "" if key[:1] == b"p" else tenant
    return f"{xxhash.xxh3_64_intdigest(owner.encode() + b'/' + key):016x}"
