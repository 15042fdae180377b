"""Rows of the prefix tree: the tables' nodes with their holders, merged over ingresses, and filtered for a viewer."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from router.protocol.block_hash import HASH_BYTES
from serve_app.live.prefix_table import Kind, Node, PrefixTable, node_id

SHOWN_NODES = 256
"""The limit of nodes for one watcher."""

LEAST_NODES = 16
"""The minimum for each configured tenant. A tenant's rows do not show the number of other active tenants."""


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


def shown(sources: Iterable[NodeRows], viewer: str | None) -> dict[str, NodeRow]:
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
