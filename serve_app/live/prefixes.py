"""The prefixes of each tenant's prompts, and their rows for a viewer. Counts only, never text.

Each tenant has its own room, so its view does not depend on other tenants. Always kept. Not thread-safe.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

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

SHOWN_NODES = 256
"""The limit of nodes for one watcher."""

LEAST_NODES = 16
"""The minimum for each configured tenant. A tenant's rows do not show the number of other active tenants."""


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
    """One tenant's nodes by key. A parent is never older than its children."""

    def __init__(self) -> None:
        self.nodes: OrderedDict[bytes, Node] = OrderedDict()
        self.bytes = 0

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

    def add(self, answered: Answered, at_s: float) -> bytes:
        """Record a generation at its first token, and return the key of its deepest node, or b"" without any."""
        tenants = max(1, self.tenants())
        room = self.rooms.setdefault(answered.tenant, TenantPrefixes())
        self.rooms.move_to_end(answered.tenant)
        while len(self.rooms) > tenants:  # tenants that are no longer configured
            self.rooms.popitem(last=False)
        chain, size = answered.chain, self.block_size
        blocks, cached_blocks = len(chain) // HASH_BYTES, answered.cached_tokens // size
        if cached_blocks >= (answered.prompt_tokens - 1) // size:
            cached_blocks = blocks  # the last prompt token is always computed, and its block with it
        public_blocks, system_blocks = min(answered.public_blocks, blocks), min(answered.system_tokens // size, blocks)
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
            touched[-1].pinned |= answered.pinned
        if public:
            touched.append(room.touch(public, "public", b"", 0, chain[: public_blocks * HASH_BYTES], cached_blocks))
        for node in touched:
            node.last_used_at_s = at_s
        if touched and answered.label and touched[-1].kind != "conversation":
            touched[-1].label = answered.label
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
    for index in range(last, start - 1, -1):
        key = b"c" + hash_at(chain, index)
        if key in nodes:
            return key
    return b"c" + hash_at(chain, last)


def node_id(tenant: str, key: bytes) -> str:
    """Return a node's id in events: 16 hex digits. A public node has the same id for every tenant."""
    owner = "" if key[:1] == b"p" else tenant
    return f"{xxhash.xxh3_64_intdigest(owner.encode() + b'/' + key):016x}"


def decision_row(answered: Answered, key: bytes, rate: float | None) -> dict[str, Any]:
    """Return the fields of a decision. ``key``: of its node, or b"" for none. ``rate``: the replica's prefill rate."""
    decision, cached_tokens, ttft_s = answered.decision, answered.cached_tokens, answered.ttft_s
    return {
        "request": answered.request_id,
        "tenant": answered.tenant,
        "replica": decision.replica_id,
        "reason": decision.reason,
        "node": node_id(answered.tenant, key) if key else None,
        "prompt_tokens": answered.prompt_tokens,
        "best_cached_tokens": decision.best_cached_tokens,
        "selected_cached_tokens": decision.selected_cached_tokens,
        "cached_tokens": cached_tokens,
        "pull_from": decision.pull_from or None,
        "pull_tokens": decision.pull_tokens,
        "queued_tokens": decision.queued_tokens,
        "estimated_ttft_s": round(decision.estimated_ttft_s, 6),
        "ttft_s": round(ttft_s, 6),
        "cold_ttft_s": round(ttft_s + cached_tokens / rate, 6) if rate else None,
    }


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A NODE of docs/reference/api.md, except that a public one has the tenant that used it."""

    id: str
    parent: str | None
    kind: Kind
    tenant: str | None
    label: str
    prefix_tokens: int
    tokens: int
    pinned: bool
    requests: int
    hits: int
    last_used_at_s: float
    holders: Mapping[str, int]


NodeRows = Mapping[tuple[str, str], NodeRow]
"""By tenant and id."""


def node_rows(table: PrefixTable, match: Callable[[bytes], Mapping[str, int]]) -> NodeRows:
    """Return one ingress' rows. ``match``: maps a chain to the leading tokens that each replica can reuse."""
    most = max(LEAST_NODES, SHOWN_NODES // max(1, table.tenants()))
    return {
        (tenant, node_id(tenant, key)): _row(tenant, key, node, table.block_size, match(node.chain))
        for tenant, room in table.rooms.items()
        for key, node in islice(reversed(room.nodes.items()), most)
    }


def _row(tenant: str, key: bytes, node: Node, size: int, held_tokens: Mapping[str, int]) -> NodeRow:
    tokens, before = len(node.chain) // HASH_BYTES * size, node.parent_blocks * size
    return NodeRow(
        id=node_id(tenant, key),
        parent=node_id(tenant, node.parent) if node.parent else None,
        kind=node.kind,
        tenant=tenant,
        label=node.label,
        prefix_tokens=tokens,
        tokens=tokens - before,
        pinned=node.pinned,
        requests=node.requests,
        hits=node.hits,
        last_used_at_s=round(node.last_used_at_s, 3),
        holders={replica: held - before for replica, held in held_tokens.items() if held > before},
    )


def visible_nodes(sources: Iterable[NodeRows], viewer: str | None) -> dict[str, NodeRow]:
    """Return a viewer's (None: an operator's) rows by id, merged and limited to the most recently used ones."""
    merged: dict[str, NodeRow] = {}
    for rows in sources:
        for (tenant, name), row in rows.items():
            if viewer in (None, tenant):
                own = replace(row, tenant=None) if row.kind == "public" else row
                merged[name] = _merged(merged[name], own) if name in merged else own
    latest = sorted(merged.values(), key=lambda row: (-row.last_used_at_s, row.prefix_tokens))[:SHOWN_NODES]
    ids = {row.id for row in latest}
    # If an ingress dropped a parent before its children, the children move to the root.
    return {row.id: row if row.parent is None or row.parent in ids else replace(row, parent=None) for row in latest}


def _merged(one: NodeRow, other: NodeRow) -> NodeRow:
    later = one if one.last_used_at_s >= other.last_used_at_s else other
    return replace(
        later,
        label=one.label or other.label,
        pinned=one.pinned or other.pinned,
        requests=one.requests + other.requests,
        hits=one.hits + other.hits,
    )
