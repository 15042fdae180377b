"""Properties of the table of prefixes, and of its visible rows."""

import pytest
from hypothesis import given

from serve_app.live import prefixes
from serve_app.live.prefixes import LEAST_NODES, SHOWN_NODES, PrefixTable, node_rows
from tests.serve_app.live.traffic import BLOCK, USES, Uses, answered, chain_of, filled


@pytest.fixture(params=[("MAX_TENANT_NODES", 6), ("MAX_TENANT_BYTES", 2000)], ids=["nodes", "bytes"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, *request.param)


def test_a_prompt_has_three_nodes() -> None:
    """They are public prompt, system prompt and conversation. Later turns belong to the same conversation."""
    table = PrefixTable(BLOCK, lambda: 1)

    def ask(blocks: list[int], cached: int) -> bytes:
        chain = chain_of("a", blocks, 1)
        system_tokens = 3 * BLOCK + 1
        told = answered(
            "a", chain, len(blocks) * BLOCK + 1, cached, public_blocks=1, system_tokens=system_tokens, label="p@1"
        )
        return table.add(told, 0.0)

    first = ask([0, 1, 2, 3], 0)
    assert ask([0, 1, 2, 3, 4, 5], 16) == first
    other = ask([0, 1, 2, 7, 4], 12)
    nodes = table.rooms["a"].nodes
    assert other != first
    assert [(node.kind, node.parent_blocks, len(node.chain) // 16) for node in nodes.values()] == [
        ("conversation", 3, 6),
        ("conversation", 3, 5),
        ("system", 1, 3),
        ("public", 0, 1),
    ]
    conversation, second, system, public = nodes.values()
    assert (conversation.requests, conversation.hits) == (2, 1)
    assert (second.requests, second.hits) == (1, 0)
    assert (system.requests, system.hits, public.requests, public.hits) == (3, 2, 3, 2)
    assert (public.label, system.label) == ("p@1", "")
    assert system.parent in nodes
    assert nodes[system.parent] is public


@pytest.mark.usefixtures("small")
@given(USES)
def test_rooms_are_bounded_and_do_not_depend_on_other_tenants(uses: Uses) -> None:
    """For any number of requests, bytes are counted correctly, and a node's parent is present."""
    rooms, alone = filled(uses).rooms, filled([use for use in uses if use.tenant == "a"]).rooms
    for room in rooms.values():
        assert len(room.nodes) <= prefixes.MAX_TENANT_NODES
        assert room.bytes <= prefixes.MAX_TENANT_BYTES
        assert room.bytes == sum(node.bytes for node in room.nodes.values())
        for node in room.nodes.values():
            assert not node.parent or node.parent in room.nodes
            assert node.hits <= node.requests
    assert rooms.keys() - {"b"} == alone.keys()
    assert "a" not in rooms or list(rooms["a"].nodes.items()) == list(alone["a"].nodes.items())


@pytest.mark.parametrize(("tenants", "most"), [(1, SHOWN_NODES), (4, SHOWN_NODES // 4), (100, LEAST_NODES)])
def test_a_tenants_number_of_rows_is_independent_of_other_tenants_activity(tenants: int, most: int) -> None:
    """Otherwise a tenant could count the active ones."""
    table = PrefixTable(BLOCK, lambda: tenants)

    def ask(tenant: str, number: int) -> int:
        table.add(answered(tenant, chain_of(tenant, [number]), BLOCK + 1, 0), float(number))
        return sum(owner == "a" for owner, _ in node_rows(table, lambda _: {}))

    assert [ask("a", number) for number in range(SHOWN_NODES)][-1] == most
    assert {ask(f"other{number}", number) for number in range(tenants - 1)} <= {most}


def test_tenants_that_share_kv_share_only_ids_of_public_prompts() -> None:
    """In a trust group, equal prompts have the same hashes. A tenant's ids do not reveal another tenant's prompts."""
    table = PrefixTable(BLOCK, lambda: 2)
    for tenant in "ab":
        table.add(answered(tenant, chain_of("group", [1, 2], 1), 2 * BLOCK + 1, 0, public_blocks=1), 0.0)
    rows = node_rows(table, lambda _: {})
    ids = {tenant: {name for owner, name in rows if owner == tenant} for tenant in "ab"}
    assert [row.kind for (_, name), row in rows.items() if name in ids["a"] & ids["b"]] == ["public", "public"]
    assert len(ids["a"]) == len(ids["b"]) == 2
