"""KV that one engine computed serves another: equal tokens, fewer computed ones, nothing unproven accepted."""

from dataclasses import replace

import numpy as np
import pytest

from router.protocol.block_hash import hash_blocks, split_chain
from router.protocol.events import BlocksStored, Event
from serve_app.cache.kv_chain import FormatMismatch, KvChain, WrongChain, WrongScope
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.engine.core.engine import TorchEngine
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.simulated import MakeSimulated
from tests.serve_app.engine.tiny import SCOPE, SECRET, Collector, prompt, request, run_all, sample

ROOT = SCOPE.root(SECRET)


def export(engine: TorchEngine, ids: np.ndarray) -> KvChain:
    chain = engine.transfer.export_prefix(HashedTokens(SCOPE, ids, hash_blocks(ROOT, ids, 16)))
    assert chain is not None
    return chain


def import_whole(engine: TorchEngine, chain: KvChain, ids: np.ndarray, root: bytes = ROOT, **scope: bytes) -> int:
    """Import a chain from its start for a request of ``ids`` under this root; return the blocks held then."""
    return engine.transfer.import_part(
        chain, HashedTokens(replace(SCOPE, **scope), ids, hash_blocks(root, ids, 16), "default"), 0
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_import_gives_the_same_tokens_for_less_work(dtype: str, make_engine: MakeEngine) -> None:
    ids = prompt(200)
    first, events = make_engine(dtype=dtype), list[Event]()
    expected = run_all(first, [request("a", ids, 12)]).tokens["a"]
    second = make_engine(dtype=dtype, events=events)
    chain = export(first, ids)
    assert import_whole(second, chain, ids) == 12
    got = run_all(second, [request("b", ids, 12)])
    assert got.tokens["b"] == expected
    assert got.cached["b"] == 192
    assert sample(second, "warmpath_prompt_tokens_computed_total") == 8
    told = [event for event in events if isinstance(event, BlocksStored)]
    assert told[0] == BlocksStored(chain.header.hashes)
    assert sample(second, "warmpath_kv_cache_blocks", state="used") == 0


def test_held_blocks_are_not_loaded_again(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import covers a held part, or a held whole."""
    ids = prompt(160)
    first, second = make_engine(), make_engine()
    run_all(first, [request("a", ids, 1)])
    run_all(second, [request("a", ids[:64], 1)])
    chain = export(first, ids)
    copied: list[int] = []
    write = second.runner.write_blocks
    monkeypatch.setattr(second.runner, "write_blocks", lambda to, rows: (copied.extend(to), write(to, rows)))
    for _ in range(2):
        assert import_whole(second, chain, ids) == 10
        assert len(copied) == 6
    assert len(second.cache.index) == 10


def test_excess_blocks_are_left_out(make_engine: MakeEngine, reference: Reference) -> None:
    """Ten blocks go to a pool of eight with a running sequence: its reservation stays, the chain's head is imported."""
    ids = prompt(160)
    first = make_engine()
    run_all(first, [request("a", ids, 1)])
    small = make_engine(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=32, start=False)
    collector = Collector()
    small.submit(request("busy", prompt(16, 5), 49), collector)
    small.start()
    collector.wait_tokens("busy", 1)
    assert 4 <= import_whole(small, export(first, ids), ids) <= 8
    collector.wait(["busy"])
    assert collector.tokens["busy"] == reference("qwen3", prompt(16, 5), 49)
    assert run_all(small, [request("hit", ids[:70], 2)]).cached["hit"] == 64


def test_unproven_blocks_are_refused(make_engine: MakeEngine) -> None:
    ids = prompt(160)
    first = make_engine(model_fingerprint="m")
    run_all(first, [request("a", ids, 1)])
    chain = export(first, ids)
    with pytest.raises(FormatMismatch, match="model"):
        import_whole(make_engine(model_fingerprint="n"), chain, ids)
    with pytest.raises(FormatMismatch, match="parts"):
        import_whole(make_engine(model_fingerprint="m", dtype="bfloat16"), chain, ids)
    with pytest.raises(FormatMismatch, match="block_size"):
        import_whole(make_engine(model_fingerprint="m", block_size=8), chain, ids)
    second = make_engine(model_fingerprint="m")
    with pytest.raises(WrongScope):
        import_whole(second, chain, ids, salt=b"other")
    with pytest.raises(WrongChain):
        import_whole(second, chain, ids, SCOPE.root(b"another secret"))
    assert sample(second, "warmpath_kv_cache_blocks", state="free") == 256


def test_nothing_cached_nothing_exported(make_engine: MakeEngine) -> None:
    engine = make_engine()
    hashes = hash_blocks(ROOT, prompt(100), 16)
    assert engine.transfer.export_prefix(HashedTokens(SCOPE, prompt(100), hashes)) is None
    off = make_engine(enable_prefix_caching=False)
    run_all(off, [request("a", prompt(100), 1)])
    assert off.transfer.export_prefix(HashedTokens(SCOPE, prompt(100), hashes)) is None
    run_all(engine, [request("a", prompt(100), 1)])
    assert import_whole(off, export(engine, prompt(100)), prompt(100)) == 0


def test_export_and_import_while_generating(
    make_engine: MakeEngine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It works block by block between the steps of running sequences, in a pool that evicts: all tokens are right."""
    monkeypatch.setattr("serve_app.engine.kv.transfer.STEP_BYTES", 1)
    first = make_engine(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=64)
    second = make_engine(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=64)
    busy = {f"r{i}": prompt(40 + i, i) for i in range(8)}
    collectors = [Collector(), Collector()]
    for engine, collector in zip((first, second), collectors, strict=True):
        for name, ids in busy.items():
            engine.submit(request(name, ids, 40), collector)
    for turn in range(3):
        ids = prompt(150, 50 + turn)
        expected = reference("qwen3", ids, 4)
        assert run_all(first, [request(f"x{turn}", ids, 4)]).tokens[f"x{turn}"] == expected
        chain = first.transfer.export_prefix(HashedTokens(SCOPE, ids, hash_blocks(ROOT, ids, 16)))
        if chain is not None:
            import_whole(second, chain, ids)
        assert run_all(second, [request(f"x{turn}", ids, 4)]).tokens[f"x{turn}"] == expected
    for collector in collectors:
        collector.wait(busy)
        for name, ids in busy.items():
            assert collector.tokens[name] == reference("qwen3", ids, 40)


def test_a_stopped_engine_exports_too_and_simulated_kv_has_no_bytes(make_simulated: MakeSimulated) -> None:
    ids = prompt(160)
    first, second = make_simulated(), make_simulated()
    run_all(first, [request("a", ids, 1)])
    first.stop()
    chain = export(first, ids)
    assert chain.payload.shape == (10, 0)
    assert chain.header.format.parts[0].dtype == "simulated"
    assert len(list(split_chain(chain.header.hashes))) == 10
    assert import_whole(second, chain, ids) == 10
    assert run_all(second, [request("b", np.append(ids, 1), 1)]).cached["b"] == 160
