"""Public prompts, requests' own salts and requests that store nothing, in one running vLLM for all tests."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from router.protocol.block_hash import HASH_BYTES, PrefixScope, extend_chain, split_chain
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.cache.prefix.quota import PUBLIC
from serve_app.engine.protocol import EngineRequest, Save
from tests.serve_app.engine.tiny import request, root_of, run_all
from tests.vllm.engines import BLOCK, Both, both_engines, eventually, outputs_of, reset

OTHER = PrefixScope("tiny", salt=b"other")
"""A scope without a public prompt. Without a salt it would be the public scope itself."""


@pytest.fixture(scope="module")
def both(demo_model_path: Path) -> Iterator[Both]:
    with both_engines(demo_model_path) as running:
        yield running


def asked(both: Both, tenant: str, name: str, seed: int = 1, salt: str = "", **fields: Any) -> EngineRequest:
    """Return a prompt of ten blocks and some tokens, of which the first six blocks are public."""
    scope = PrefixScope("tiny", salt=f"{tenant}/{salt}".encode(), public_blocks=6)
    ids = np.concatenate([both.prompt(6 * BLOCK + 10, seed=70), both.prompt(4 * BLOCK, seed=seed)])
    return structs.replace(request(name, ids, 6, scope=scope, tenant=tenant), **fields)


def chain_of(item: EngineRequest) -> bytes:
    return extend_chain(item.root, item.scope.public_blocks, item.token_ids, BLOCK)


def heard(both: Both, chain: bytes = b"") -> None:
    """Check that routers know a chain as held; vLLM's next step reports all earlier events."""
    run_all(both.vllm, [request("step", [1], 1, scope=OTHER)])
    eventually(lambda: set(split_chain(chain)) <= both.heard.held())


def cached(both: Both, item: EngineRequest) -> int:
    """Return a request's cached blocks, which must be the predicted ones; its stored blocks are then known."""
    predicted = both.vllm.known_blocks(chain_of(item), 10)
    assert run_all(both.vllm, [item]).cached[item.request_id] == BLOCK * predicted
    heard(both, chain_of(item)[: 10 * HASH_BYTES] if item.store_kv else b"")
    return predicted


def test_tenants_share_a_public_prompt_and_nothing_behind_it(both: Both) -> None:
    """Salts of one tenant share nothing behind it either. Answers are those of the built-in engine."""
    reset(both)
    first, second = asked(both, "a", "a"), asked(both, "b", "b")
    assert [cached(both, item) for item in (first, second, first, second)] == [0, 6, 10, 10]
    assert [cached(both, asked(both, "a", "salted", salt="own")) for _ in range(2)] == [6, 10]
    plain = structs.replace(first, request_id="plain", scope=first.scope.private, root=root_of(first.scope.private))
    assert cached(both, plain) == 0
    wanted = run_all(both.torch, [first]).tokens["a"]
    assert run_all(both.vllm, [first, second]).tokens == {"a": wanted, "b": wanted}


def test_a_request_that_stores_nothing_reads_and_leaves_nothing(both: Both) -> None:
    """It leaves nothing of a public prompt or of its answer either."""
    reset(both)
    unstored = asked(both, "a", "u", store_kv=False)
    assert [cached(both, unstored) for _ in range(2)] == [0, 0]
    assert not both.heard.held()
    assert cached(both, asked(both, "b", "stored")) == 0
    before = both.heard.held()
    assert [cached(both, unstored) for _ in range(2)] == [6, 6]
    cached(both, structs.replace(unstored, sampling=replace(unstored.sampling, max_tokens=3 * BLOCK)))
    assert both.heard.held() == before >= set(split_chain(chain_of(unstored)[: 6 * HASH_BYTES]))


def test_public_blocks_stay_public_when_moved(both: Both) -> None:
    """They are offered first, on the public account, and are public at the receiver; the tail is its tenant's."""
    reset(both)
    item = asked(both, "a", "moves", seed=2)
    assert cached(both, item) == 0
    hot = both.vllm.transfer.hot_prefixes()
    assert [(run.kind, run.tenant, run.blocks) for run in hot.runs] == [("public", PUBLIC, 6), ("prefix", "a", 4)]
    for prefix, first, blocks in ((hot.prefix(0), 0, 6), (hot.prefix(1), 6, 10)):
        part = both.vllm.transfer.export_prefix(prefix, first)
        assert part is not None
        reset(both)
        assert not first or cached(both, asked(both, "b", "before", seed=3)) == 0
        assert both.vllm.transfer.import_part(part, prefix, first) == blocks
        heard(both, prefix.chain)
        assert cached(both, asked(both, "b", "there", seed=2)) == 6
        assert cached(both, structs.replace(item, request_id="back")) == blocks


def test_a_save_behind_a_public_prompt_stays(both: Both) -> None:
    """So does a save of public blocks alone, which another replica's save brought."""
    reset(both)
    item = asked(both, "a", "saved", seed=4)
    first = outputs_of(both.vllm, structs.replace(item, saves=(Save(b"s" * 16, 10 * BLOCK),)))[0].first
    assert first is not None and first.save is not None and first.save.outcome == "saved"
    run_all(both.vllm, [request(f"f{i}", both.prompt(900, seed=80 + i), 1, scope=OTHER) for i in range(5)])
    assert cached(both, item) == 10
    (saved,) = both.vllm.transfer.hot_prefixes().saves
    assert (saved.key, saved.tenant) == (b"s" * 16, "a")
    head = HashedTokens(item.scope, item.token_ids[: 6 * BLOCK], chain_of(item)[: 6 * HASH_BYTES], PUBLIC)
    assert both.vllm.transfer.take_over_pin(replace(saved, key=b"t" * 16), head) == "pinned"
    assert both.vllm._saves.pins.holdings() == {"a": 10}
    reset(both)
    assert cached(both, item) == 0
