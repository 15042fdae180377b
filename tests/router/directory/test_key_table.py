"""KeyTable against a plain dict."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.directory.key_table import KeyTable

keys = st.integers(0, 40).map(lambda n: (n // 3) << 28 | n % 2)
operations = st.lists(st.tuples(st.lists(keys, max_size=12), st.sampled_from(["add", "remove", "bump"])), max_size=60)


def step_of(operation: str, value: int) -> int:
    return {"add": value or 1, "remove": 0, "bump": value + 1 if value else 0}[operation]


@settings(max_examples=200)
@given(operations=operations)
def test_table_equals_dict(operations: list[tuple[list[int], str]]) -> None:
    """Colliding keys, removals and growth never lose, duplicate or confuse an entry, and the counts agree."""
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
