"""KeyTable against a plain dict."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.directory.key_table import KeyTable, block_keys

keys = st.integers(0, 40).map(lambda n: (n // 3) << 28 | n % 2)
operations = st.lists(st.tuples(st.lists(keys, max_size=12), st.sampled_from(["add", "remove", "bump"])), max_size=60)


def step_of(operation: str, value: int) -> int:
    return {"add": value or 1, "remove": 0, "bump": value + 1 if value else 0}[operation]


@settings(max_examples=200)
@given(operations=operations)
def test_table_equals_dict(operations: list[tuple[list[int], str]]) -> None:
    """Colliding keys, removals and growth never lose, double or mix up an entry, and the counts agree."""
    table, oracle = KeyTable(10_000), dict[int, int]()
    for some_keys, operation in operations:
        changes, xor = table.update(some_keys, lambda value, operation=operation: step_of(operation, value))
        moved = moved_xor = 0
        for key in some_keys:
            old = oracle.get(key, 0)
            new = step_of(operation, old)
            moved += new != old
            moved_xor ^= (key >> 28) * (key % 2**28) if new != old else 0
            oracle.pop(key, None)
            if new:
                oracle[key] = new
        assert (sum(count for _, _, count in changes), xor) == (moved, moved_xor)
        assert table.num_entries == len(oracle)
    for number in range(41):
        key = (number // 3) << 28 | number % 2
        assert table.get(key) == oracle.get(key, 0)


def test_churn_does_not_grow_the_table() -> None:
    """Storing and removing for ever stays within the memory of what is held at once."""
    table = KeyTable(100_000)
    rng = Random(0)
    held: list[list[int]] = []
    sizes = []
    for turn in range(400):
        held.append(block_keys(rng.randbytes(16 * 256)))
        table.update(held[-1], lambda value: value or 1)
        if len(held) > 40:
            table.update(held.pop(rng.randrange(20)), lambda value: 0)
        if turn % 100 == 99:
            sizes.append(table.size_bytes)
    assert table.num_entries == 40 * 256
    assert sizes[-1] <= 1.5 * sizes[0]
