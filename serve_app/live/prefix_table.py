"""The prefixes of each tenant's prompts: public prompt, system prompt, conversation. Counts only, never text.

Each tenant has its own room, so its view does not depend on other tenants. Always kept. Not thread-safe.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import xxhash

from router.protocol.block_hash import HASH_BYTES, hash_at
from router.protocol.request import Decision

Kind = Literal["public", "system", "conversation"]

MAX_TENANT_NODES = 1024
MAX_TENANT_BYTES = 8 << 20
MAX_BYTES = 32 << 20
"""The limit of all tenants' nodes. Each tenant has an equal share."""

FIRST_BLOCKS = 4
"""A conversation is recognized by its first blocks, because its later prompts start like the earlier ones."""


@dataclass(slots=True)
class Node:
    """One prefix. ``chain``: its block hashes from the start of the prompt; ``parent_blocks``: those of its parent.

    ``requests``: generations that started with it; ``hits``: those that reused all of it.
    """

    kind: Kind
    parent: bytes = b""
    parent_blocks: int = 0
    chain: bytes = b""
    label: str = ""
    requests: int = 0
    hits: int = 0
    last_used_at_s: float = 0.0
    pinned: bool = False

    @property
    def bytes(self) -> int:
        """The approximate memory: the hashes, and 512 bytes for the rest."""
        return len(self.chain) + 512


@dataclass(frozen=True, slots=True)
class Answered:
    """A request after its first token. ``chain``: the hashes of its prompt's full blocks.

    ``label``: the registered prompt at its start; ``pinned``: whether a save of its system prompt is kept.
    """

    request_id: str
    tenant: str
    chain: bytes
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    decision: Decision
    public_blocks: int = 0
    system_tokens: int = 0
    label: str = ""
    pinned: bool = False


class TenantPrefixes:
    """One tenant's nodes by key, and totals of its generations. A parent is never older than its children."""

    def __init__(self) -> None:
        self.nodes: OrderedDict[bytes, Node] = OrderedDict()
        self.bytes = 0
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def touch(
        self, key: bytes, kind: Kind, parent: bytes, parent_blocks: int, chain: bytes, cached_blocks: int
    ) -> Node:
        """Record a use of a node, which may be new, or longer than before. ``chain``: its current block hashes."""
        node = self.nodes.get(key)
        blocks = len(chain) // HASH_BYTES
        if node is None:
            node = self.nodes[key] = Node(kind)
            self.bytes += node.bytes
        elif kind == "conversation":
            # A new turn cannot be cached yet, so a hit only needs the earlier turns.
            blocks = min(len(node.chain) // HASH_BYTES, blocks)
        self.nodes.move_to_end(key)
        self.bytes += len(chain) - len(node.chain)
        node.parent, node.parent_blocks, node.chain = parent, parent_blocks, chain
        node.requests += 1
        node.hits += cached_blocks >= blocks
        return node


class PrefixTable:
    """The rooms of all tenants. ``tenants``: returns the number of configured tenants."""

    def __init__(self, block_size: int, tenants: Callable[[], int]) -> None:
        self.block_size = block_size
        self.tenants = tenants
        self.rooms: OrderedDict[str, TenantPrefixes] = OrderedDict()

    def add(self, told: Answered, at_s: float) -> bytes:
        """Record a generation at its first token, and return the key of its deepest node, or b"" without any."""
        tenants = max(1, self.tenants())
        room = self.rooms.setdefault(told.tenant, TenantPrefixes())
        self.rooms.move_to_end(told.tenant)
        while len(self.rooms) > tenants:  # tenants that are no longer configured
            self.rooms.popitem(last=False)
        room.requests += 1
        room.prompt_tokens += told.prompt_tokens
        room.cached_tokens += told.cached_tokens
        chain, size = told.chain, self.block_size
        blocks, cached_blocks = len(chain) // HASH_BYTES, told.cached_tokens // size
        if cached_blocks >= (told.prompt_tokens - 1) // size:
            cached_blocks = blocks  # the last prompt token is always computed, and its block with it
        public_blocks, system_blocks = min(told.public_blocks, blocks), min(told.system_tokens // size, blocks)
        public = b"p" + hash_at(chain, public_blocks - 1) if public_blocks else b""
        parent, start = public, public_blocks
        if system_blocks > public_blocks:
            parent, start = b"s" + hash_at(chain, system_blocks - 1), system_blocks
        deepest, touched = parent, []
        # Children first, so that a parent is more recently used than its children.
        if blocks > start:
            deepest = _conversation_key(room.nodes, chain, start, blocks)
            touched.append(room.touch(deepest, "conversation", parent, start, chain, cached_blocks))
        if parent != public:
            head = chain[: start * HASH_BYTES]
            touched.append(room.touch(parent, "system", public, public_blocks, head, cached_blocks))
            touched[-1].pinned |= told.pinned
        if public:
            touched.append(room.touch(public, "public", b"", 0, chain[: public_blocks * HASH_BYTES], cached_blocks))
        for node in touched:
            node.last_used_at_s = at_s
        if touched and told.label and touched[-1].kind != "conversation":
            touched[-1].label = told.label
        most_bytes = min(MAX_TENANT_BYTES, MAX_BYTES // tenants)
        while room.nodes and (room.bytes > most_bytes or len(room.nodes) > MAX_TENANT_NODES):
            room.bytes -= room.nodes.popitem(last=False)[1].bytes
        return deepest

    def forget_pins(self) -> None:
        """Mark all nodes as not pinned."""
        for room in self.rooms.values():
            for node in room.nodes.values():
                node.pinned = False


def _conversation_key(nodes: OrderedDict[bytes, Node], chain: bytes, start: int, blocks: int) -> bytes:
    """Return the key of a prompt's conversation: that of the earlier prompt that shares the most first blocks."""
    last = min(start + FIRST_BLOCKS, blocks) - 1
    keys = [b"c" + hash_at(chain, index) for index in range(last, start - 1, -1)]
    return next((key for key in keys if key in nodes), keys[0])


def node_id(tenant: str, key: bytes) -> str:
    """Return a node's id in events: 16 hex digits. A public node has the same id for every tenant."""
    owner = "" if key[:1] == b"p" else tenant
    return f"{xxhash.xxh3_64_intdigest(owner.encode() + b'/' + key):016x}"
