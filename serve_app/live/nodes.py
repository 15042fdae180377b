"""Rows of the trie as they are shown: the table's nodes with their holders, merged over ingresses, cut for a viewer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from router.protocol.block_hash import HASH_BYTES
from serve_app.live.prefix_table import Kind, Node, PrefixTable, node_id

SHOWN_NODES = 256
"""To one watcher."""

LEAST_NODES = 16
"""Of each tenant, however many are configured; how many ask something is no tenant's to see."""

STALE_TICKS = 4
"""The holders of nodes that nobody uses are looked up this often, in refreshes."""

Match = Callable[[bytes], Mapping[str, int]]
"""From a chain to the leading tokens that each replica can reuse."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """NODE in docs/live.md, but that a public one has the tenant that used it."""

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


Key = tuple[str, str]
"""A row's tenant and id."""


class NodeRows:
    """The rows of one ingress' table. ``versions``: the refresh, counted from ``version``, that each is from."""

    def __init__(self, table: PrefixTable, match: Match, version: int = 0) -> None:
        self._table = table
        self._match = match
        self.rows: dict[Key, NodeRow] = {}
        self.versions: dict[Key, int] = {}
        self.version = version

    def refresh(self) -> None:
        """Bring the rows up to date."""
        self.version += 1
        most = max(LEAST_NODES, SHOWN_NODES // max(1, self._table.tenants()))
        kept: dict[Key, NodeRow] = {}
        for tenant, room in self._table.rooms.items():
            for index, (key, node) in enumerate(room.latest(most)):
                at = tenant, node_id(tenant, key)
                before = self.rows.get(at)
                stale = (index + self.version) % STALE_TICKS == 0
                if before is None or stale or before.last_used_at_s != node.last_used_at_s:
                    row = self._row(tenant, at[1], node)
                    if row != before:
                        self.versions[at] = self.version
                    kept[at] = row
                else:
                    kept[at] = before
        self.rows = kept
        self.versions = {key: self.versions[key] for key in kept}

    def since(self, version: int) -> list[NodeRow]:
        """Return the rows that are other than in an earlier refresh."""
        return [self.rows[key] for key, changed in self.versions.items() if changed > version]

    def _row(self, tenant: str, name: str, node: Node) -> NodeRow:
        size = self._table.block_size
        blocks, before = len(node.chain) // HASH_BYTES, node.parent_blocks * size
        return NodeRow(
            id=name,
            parent=node_id(tenant, node.parent) if node.parent else None,
            kind=node.kind,
            tenant=tenant,
            label=node.label,
            prefix_tokens=blocks * size,
            tokens=blocks * size - before,
            pinned=node.pinned,
            requests=node.requests,
            hits=node.hits,
            last_used_at_s=round(node.last_used_at_s, 3),
            holders={name: held - before for name, held in self._match(node.chain).items() if held > before},
        )


def shown(sources: Iterable[Mapping[Key, NodeRow]], viewer: str | None) -> dict[str, NodeRow]:
    """Return the rows that a viewer sees, merged, by id: those used last, never a node without its parent.

    ``sources``: rows by ingress. ``viewer``: a tenant's name, None for an operator.
    """
    found: dict[str, NodeRow] = {}
    for rows in sources:
        for (tenant, name), row in rows.items():
            if viewer not in (None, tenant):
                continue
            mine = replace(row, tenant=None) if row.kind == "public" else row
            other = found.get(name)
            found[name] = mine if other is None else _merged(other, mine)
    latest = sorted(found.values(), key=lambda row: (-row.last_used_at_s, row.prefix_tokens))[:SHOWN_NODES]
    kept = {row.id: row for row in latest}
    # A parent may have gone where an ingress forgot it sooner: its children stand at the root then.
    return {
        name: row if row.parent is None or row.parent in kept else replace(row, parent=None)
        for name, row in kept.items()
    }


def _merged(one: NodeRow, other: NodeRow) -> NodeRow:
    later = one if one.last_used_at_s >= other.last_used_at_s else other
    return replace(
        later,
        label=one.label or other.label,
        pinned=one.pinned or other.pinned,
        requests=one.requests + other.requests,
        hits=one.hits + other.hits,
    )
