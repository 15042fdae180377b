"""Which rows a tenant has: its latest, and as many of them whoever else is there."""

from __future__ import annotations

import pytest

from serve_app.live.nodes import LEAST_NODES, SHOWN_NODES, NodeRows
from serve_app.live.prefix_table import PrefixTable
from tests.serve_app.live.traffic import BLOCK, chain_of


@pytest.mark.parametrize(("tenants", "most"), [(1, SHOWN_NODES), (4, SHOWN_NODES // 4), (100, LEAST_NODES)])
def test_a_tenant_has_as_many_rows_whether_others_ask_or_not(tenants: int, most: int) -> None:
    """By its number a tenant could count those who are awake."""
    table = PrefixTable(BLOCK, lambda: tenants)
    rows = NodeRows(table, lambda _: {})

    def ask(tenant: str, number: int) -> int:
        table.add(tenant, chain_of(tenant, [number]), BLOCK + 1, 0, float(number))
        rows.refresh()
        return sum(whose == "a" for whose, _ in rows.rows)

    for number in range(SHOWN_NODES):
        alone = ask("a", number)
    assert alone == most
    assert {ask(f"other{number}", number) for number in range(tenants - 1)} <= {most}
