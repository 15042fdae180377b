"""No tenant's blocks are taken for another's, in any of the forms in which servers publish them."""

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from router.vllm_events.batches import KvEvent, decode_batch
from router.vllm_events.far_engine import FarEngine
from tests.harness.worker_double import as_sglang
from tests.router.vllm_events.pool_model import PoolModel, Routers, encode

SIZE = 2
ROOTS = (b"a" * 16, b"b" * 16, b"", b"not one of ours")
"""Two tenants, a client that goes past us without a salt, and one with a salt of its own."""

TURNS = st.lists(
    st.tuples(
        st.sampled_from(ROOTS),
        st.sampled_from([None, "x"]),
        st.lists(st.integers(0, 1), min_size=1, max_size=9),
        st.sampled_from(["", "", "", "lost", "restart"]),
    ),
    max_size=25,
)


def as_arrays(events: Sequence[KvEvent]) -> bytes:
    """Return the payload of vLLM before it sent maps."""
    order = (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    )
    told = []
    for event in events:
        fields: dict[str, Any] = msgspec.to_builtins(event, builtin_types=(bytes,))
        if fields["type"] == "BlockStored":
            told.append(["BlockStored", *(fields.get(name) for name in order)])
        else:
            told.append([fields["type"], *([fields["block_hashes"]] if "block_hashes" in fields else [])])
    return msgspec.msgpack.encode([1.0, told])


def in_sglangs_form(events: Sequence[KvEvent]) -> bytes:
    return msgspec.msgpack.encode([1.0, [as_sglang(event) for event in events], 0])


@given(TURNS, st.sampled_from([encode, as_arrays, in_sglangs_form]))
def test_blocks_are_told_under_the_root_that_computed_them_and_no_other(
    turns: list[tuple[bytes, str | None, list[int], str]], form: Any
) -> None:
    """With clients that go past us, lost batches and restarts; a foreign salt or none tells nothing."""
    model, routers = PoolModel(6, SIZE), Routers()
    engine = FarEngine(SIZE, 6, routers)
    for root, lora, tokens, event in turns:
        if event == "restart":
            model = PoolModel(6, SIZE)
            engine.hear(engine.pool.forget())
        request = model.begin(root, lora, list(tokens), len(tokens))
        if request is not None:
            model.end(request)
        events = model.take_events()
        if event == "lost":
            engine.hear(engine.pool.forget())
        elif events:
            engine.hear(engine.pool.translate(decode_batch(form(events))))
        assert routers.held() == set(engine.pool)
        ours = {model.ours[name] for name in model.content.values() if model.roots.get(name) in ROOTS[:2]}
        assert set(engine.pool) <= ours
