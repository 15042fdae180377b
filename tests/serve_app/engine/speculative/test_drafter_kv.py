"""A drafter's KV goes down, up and across with the base's: what comes back drafts as well as before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from router.protocol.block_hash import hash_blocks
from serve_app.cache.kv_chain import FormatMismatch
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.cache.tiers.tiers import TierSettings
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.speculative.test_speculative import acceptance
from tests.serve_app.engine.tiny import SCOPE, SECRET, prompt, request, run_all, save_draft

ROOT = SCOPE.root(SECRET)


@pytest.fixture(scope="module")
def draft(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A copy of the base: with the right KV it agrees at every position, with none it would not."""
    return str(save_draft(checkpoints["qwen3"], tmp_path_factory.mktemp("same"), 0.0))


def test_the_drafters_kv_comes_back_from_host_memory(draft: str, make_engine: MakeEngine, reference: Reference) -> None:
    engine = make_engine(
        speculative_model=draft,
        num_speculative_tokens=3,
        tiers=TierSettings(host_bytes=8 << 20, load_ratio=1e9),
        num_blocks=24,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    ids = prompt(150)
    run_all(engine, [request("warm", ids, 1)])
    for i in range(2):
        run_all(engine, [request(f"churn{i}", prompt(300, 10 + i), 1)])
    engine._runner.pools[1].zero_()  # type: ignore[attr-defined]
    got = run_all(engine, [request("hit", ids, 20)])
    assert got.cached["hit"] == 144
    assert got.tokens["hit"] == reference("qwen3", ids, 20)
    assert acceptance(engine) == 1.0


def test_the_drafters_kv_travels_with_the_bases(draft: str, make_engine: MakeEngine, reference: Reference) -> None:
    ids = prompt(160)
    first = make_engine(speculative_model=draft, num_speculative_tokens=3, speculative_fingerprint="d")
    run_all(first, [request("a", ids, 1)])
    chain = first.export_prefix(HashedTokens(SCOPE, ids, hash_blocks(ROOT, ids, 16)))
    assert chain is not None
    assert [part.model for part in chain.header.format.parts] == ["", "d"]
    second = make_engine(speculative_model=draft, num_speculative_tokens=3, speculative_fingerprint="d")
    assert second.import_part(chain, HashedTokens(SCOPE, ids, chain.header.hashes, "default"), 0) == 10
    more = np.append(ids, np.int32(5))
    got = run_all(second, [request("b", more, 20)])
    assert got.cached["b"] == 160
    assert got.tokens["b"] == reference("qwen3", more, 20)
    assert acceptance(second) == 1.0
    for other in (make_engine(), make_engine(speculative_model=draft, speculative_fingerprint="another")):
        with pytest.raises(FormatMismatch, match="parts"):
            other.import_part(chain, HashedTokens(SCOPE, ids, chain.header.hashes, "default"), 0)
