"""Which prefixes tenants' prompts began with: public prompt, system prompt, conversation; counts, never text.

Each tenant has its own room: what it is shown does not depend on others. Always kept. Not thread-safe.
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
"""Of the hashes of all tenants' nodes; each has an equal part."""

FIRST_BLOCKS = 4
"""A conversation is known again by its first blocks: its later prompts begin as the earlier ones did."""


@dataclass(slots=True)
class Node:
    """One prefix. ``chain``: its block hashes from the prompt's beginning; ``parent_blocks``: those of its parent.

    ``requests``: generations that began with it; ``hits``: those of them that reused all of it.
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
        """What it takes, about: its hashes, and 512 bytes beside them."""
        return len(self.chain) + 512


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that had its first token. ``chain``: the hashes of its prompt's whole blocks.

    ``label``: the registered prompt that it begins with; ``pinned``: whether a save of its system prompt is kept.
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
    """One tenant's nodes by key, and what all of its generations were. A parent is never older than its children."""

    def __init__(self) -> None:
        self.nodes: OrderedDict[bytes, Node] = OrderedDict()
        self.bytes = 0
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def touch(
        self, key: bytes, kind: Kind, parent: bytes, parent_blocks: int, chain: bytes, cached_blocks: int
    ) -> Node:
        """Note a use of a node, which may be new, or longer than before. ``chain``: its block hashes as of now."""
        node = self.nodes.get(key)
        blocks = len(chain) // HASH_BYTES
        if node is None:
            node = self.nodes[key] = Node(kind)
            self.bytes += node.bytes
        elif kind == "conversation":
            # A new turn was never there: all that can be had is all of the earlier ones.
            blocks = min(len(node.chain) // HASH_BYTES, blocks)
        self.nodes.move_to_end(key)
        self.bytes += len(chain) - len(node.chain)
        node.parent, node.parent_blocks, node.chain = parent, parent_blocks, chain
        node.requests += 1
        node.hits += cached_blocks >= blocks
        return node


class PrefixTable:
    """The rooms of all tenants. ``tenants``: how many there are."""

    def __init__(self, block_size: int, tenants: Callable[[], int]) -> None:
        self.block_size = block_size
        self.tenants = tenants
        self.rooms: OrderedDict[str, TenantPrefixes] = OrderedDict()

    def add(self, told: Answered, at_s: float) -> bytes:
        """Note a generation whose first token came, and return the key of its deepest node, b"" for none."""
        tenants = max(1, self.tenants())
        room = self.rooms.setdefault(told.tenant, TenantPrefixes())
        self.rooms.move_to_end(told.tenant)
        while len(self.rooms) > tenants:  # tenants that are configured no more
            self.rooms.popitem(last=False)
        room.requests += 1
        room.prompt_tokens += told.prompt_tokens
        room.cached_tokens += told.cached_tokens
        chain, size = told.chain, self.block_size
        blocks, cached_blocks = len(chain) // HASH_BYTES, told.cached_tokens // size
        if cached_blocks >= (told.prompt_tokens - 1) // size:
            cached_blocks = blocks  # the last prompt token is computed whatever is cached, and its block with it
        public_blocks, system_blocks = min(told.public_blocks, blocks), min(told.system_tokens // size, blocks)
        public = b"p" + hash_at(chain, public_blocks - 1) if public_blocks else b""
        parent, start = public, public_blocks
        if system_blocks > public_blocks:
            parent, start = b"s" + hash_at(chain, system_blocks - 1), system_blocks
        deepest, touched = parent, []
        # Children first: of two a parent is to be the one used later.
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
        """Note that no save is kept any more."""
        for room in self.rooms.values():
            for node in room.nodes.values():
                node.pinned = False


def _conversation_key(nodes: OrderedDict[bytes, Node], chain: bytes, start: int, blocks: int) -> bytes:
    """Return the key of a prompt's conversation: that of the earlier prompt with the most first blocks in common."""
    last = min(start + FIRST_BLOCKS, blocks) - 1
    keys = [b"c" + hash_at(chain, index) for index in range(last, start - 1, -1)]
    return next((key for key in keys if key in nodes), keys[0])


def node_id(tenant: str, key: bytes) -> str:
    """Return what a node is called outside: 16 hex digits; public ones are the same for every tenant."""
    owner = "" if key[:1] == b"p" else tenant
    return f"{xxhash.xxh3_64_intdigest(owner.encode() + b'/' + key):016x}"
