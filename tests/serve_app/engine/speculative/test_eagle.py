"""An EAGLE-3 head guesses what the published formulas guess, from cached blocks too; answers stay those of the base."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.protocol.block_hash import PrefixScope, hash_blocks
from serve_app.cache.kv_chain import FormatMismatch
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.cache.tiers.tiers import TierSettings
from serve_app.engine.core.build import build_engine
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.settings import EngineSettings
from serve_app.engine.speculative.runner import SpeculativeRunner
from serve_app.engine.step import Segment
from tests.serve_app.engine.adapters import described, save_adapter
from tests.serve_app.engine.speculative.heads import DenseHead, save_base, save_head
from tests.serve_app.engine.tiny import SCOPE, SECRET, Collector, prompt, request, run_all, sample

ROOT = SCOPE.root(SECRET)
ACCEPTED = "warmpath_spec_decode_num_accepted_tokens_total"
DRAFTED = "warmpath_spec_decode_num_draft_tokens_total"

MakeEagle = Callable[..., TorchEngine]

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bare_residual": {"norm_before_residual": None, "fused": 0.005},
    "few_tokens": {"draft_vocab": 150, "layer": "layers.0"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("eagle_base"))


@pytest.fixture(scope="module")
def heads(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_head(base, tmp_path_factory.mktemp(name), **how) for name, how in HEADS.items()}


@pytest.fixture
def make(base: Path) -> Iterator[MakeEagle]:
    """Build an engine over the base, with ``head`` as drafter if there is one; all are stopped afterwards."""
    engines: list[TorchEngine] = []

    def build(head: Path | None = None, **overrides: Any) -> TorchEngine:
        values = {"dtype": "float32", "num_blocks": 256, "max_num_seqs": 16, "max_num_batched_tokens": 64, **overrides}
        if head is not None:
            values = {"num_speculative_tokens": 4, **values, "speculative_model": str(head)}
        engine = build_engine(base, EngineSettings(**values), lambda _: None)
        engines.append(engine)
        engine.start()
        return engine

    yield build
    for engine in engines:
        engine.stop()


class Watch:
    """Notes what the head of an engine proposes: (seed of the request, position, guesses)."""

    def __init__(self, engine: TorchEngine) -> None:
        self.seen: list[tuple[int, int, list[int]]] = []
        runner = engine._runner
        assert isinstance(runner, SpeculativeRunner)
        propose = runner.drafter.propose

        def noted(segments: Sequence[Segment]) -> list[list[int]]:
            proposals = propose(segments)
            for segment, guesses in zip(segments, proposals, strict=True):
                if guesses and segment.sampling is not None:
                    self.seen.append((segment.sampling.seed, segment.start, list(guesses)))
            return proposals

        runner.drafter.propose = noted  # type: ignore[method-assign]

    def check(self, dense: DenseHead, texts: dict[int, np.ndarray]) -> None:
        """Compare every guess with the dense formulas over the same text."""
        assert self.seen
        for seed, start, guesses in self.seen:
            assert guesses == dense.guess(texts[seed][: start + 1], len(guesses)), (seed, start)
        self.seen.clear()


def whole(ids: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    return np.concatenate([ids, np.array(tokens, dtype=np.int32)])


@pytest.mark.parametrize("name", HEADS)
def test_guesses_are_those_of_the_published_formulas_and_answers_those_of_the_base(
    name: str, base: Path, heads: dict[str, Path], make: MakeEagle
) -> None:
    """Prompts of awkward lengths together, in chunks of a step, cold and again from cached blocks."""
    prompts = {f"p{n}": prompt(n, seed=n) for n in (1, 2, 15, 16, 17, 33, 100)}
    plain = run_all(make(), [request(key, ids, 17) for key, ids in prompts.items()]).tokens
    engine = make(heads[name])
    watch, dense = Watch(engine), DenseHead(base, heads[name])
    for turn in ("cold", "warm"):
        got = run_all(engine, [request(key, ids, 17, seed=len(ids)) for key, ids in prompts.items()])
        assert got.tokens == plain, turn
        assert all(got.cached[key] == (turn == "warm") * ((len(ids) - 1) // 16 * 16) for key, ids in prompts.items())
        watch.check(dense, {len(ids): whole(ids, plain[key]) for key, ids in prompts.items()})
    assert 0 < sample(engine, ACCEPTED) < sample(engine, DRAFTED), (
        "a head that is always right or always wrong shows little"
    )


def test_a_hit_at_every_block_boundary_changes_no_token_and_no_guess(
    base: Path, heads: dict[str, Path], make: MakeEagle
) -> None:
    """Whoever filled the blocks, and went on otherwise, left the states and KV that this prompt needs.

    docs/speculation.md
    """
    ids = prompt(165)
    dense = DenseHead(base, heads["plain"])
    accepted = set()
    for cached in range(11):
        engine = make(heads["plain"])
        if cached:
            run_all(engine, [request("warm", whole(ids[: cached * 16], prompt(5, 99)), 9)])
        watch, before = Watch(engine), sample(engine, ACCEPTED)
        got = run_all(engine, [request("hit", ids, 20)])
        assert got.cached["hit"] == cached * 16, "a block keeps all that is needed to go on after it"
        watch.check(dense, {0: whole(ids, got.tokens["hit"])})
        accepted.add(sample(engine, ACCEPTED) - before)
        engine.stop()
    assert len(accepted) == 1


def test_sampled_output_equals_plain_sampling_token_for_token(heads: dict[str, Path], make: MakeEagle) -> None:
    hows: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 20},
        {},
        {"temperature": 0.5, "disable_spec_decode": True},
    ]
    wanted = [request(f"r{i}", prompt(10 + 7 * i, i), 30, seed=i, **hows[i % len(hows)]) for i in range(10)]
    plain = run_all(make(), wanted).tokens
    for name in HEADS:
        engine = make(heads[name])
        assert run_all(engine, wanted).tokens == plain, name
        assert sample(engine, ACCEPTED) > 0, name


def test_a_request_without_drafts_leaves_blocks_that_draft_well(
    base: Path, heads: dict[str, Path], make: MakeEagle
) -> None:
    engine = make(heads["plain"])
    ids = prompt(40)
    first = run_all(engine, [request("plain", ids, 60, disable_spec_decode=True)]).tokens["plain"]
    assert sample(engine, "warmpath_spec_decode_num_drafts_total") == 0
    watch = Watch(engine)
    turn = whole(ids, [*first, *prompt(3, 8)])
    got = run_all(engine, [request("next", turn, 20)])
    assert got.cached["next"] == 96, "the generated blocks as well"
    watch.check(DenseHead(base, heads["plain"]), {0: whole(turn, got.tokens["next"])})


def test_a_small_pool_under_churn_stays_right(base: Path, heads: dict[str, Path], make: MakeEagle) -> None:
    """Evicted, shared and reused blocks, drafts up to the last token of an answer, cancelled requests between."""
    engine = make(heads["plain"], num_blocks=24, max_num_seqs=4)
    watch, order = Watch(engine), random.Random(3)
    prompts = {
        i: whole(prompt(96, seed=100 + order.randrange(6)), prompt(order.randrange(1, 20), i)) for i in range(18)
    }
    gone = Collector()
    engine.submit(request("gone", prompt(50, 77), 200, seed=77, disable_spec_decode=True), gone)
    got = run_all(engine, [request(f"r{i}", ids, 9, seed=i) for i, ids in prompts.items()])
    engine.cancel("gone")
    gone.wait(["gone"])
    watch.check(DenseHead(base, heads["plain"]), {i: whole(ids, got.tokens[f"r{i}"]) for i, ids in prompts.items()})
    plain = run_all(make(), [request(f"r{i}", ids, 9) for i, ids in prompts.items()])
    assert got.tokens == plain.tokens
    assert sample(engine, "warmpath_prefix_cache_evicted_blocks_total") > 0
    assert engine._cache.pool.used_blocks == 0


def test_what_the_head_keeps_goes_down_up_and_across_with_the_bases_kv(
    base: Path, heads: dict[str, Path], make: MakeEagle
) -> None:
    """Through host memory and to another engine; an engine with another head, or none, takes none of it."""
    ids, dense = prompt(150), DenseHead(base, heads["plain"])
    tiers = TierSettings(host_bytes=8 << 20, load_ratio=1e9)
    engine = make(heads["plain"], tiers=tiers, num_blocks=24, max_num_seqs=4, speculative_fingerprint="h")
    run_all(engine, [request("warm", ids, 1)])
    chain = engine.export_prefix(HashedTokens(SCOPE, ids, hash_blocks(ROOT, ids, 16)))
    assert chain is not None
    assert [part.model for part in chain.header.format.parts] == ["", "h", "h"]
    for i in range(2):
        run_all(engine, [request(f"churn{i}", prompt(300, 10 + i), 1)])
    runner = engine._runner
    assert isinstance(runner, SpeculativeRunner)
    assert runner.block_bytes * 24 == sum(pool.nbytes for pool in runner.pools)
    for pool in runner.pools[1:]:
        pool.zero_()
    watch = Watch(engine)
    got = run_all(engine, [request("hit", ids, 12)])
    assert got.cached["hit"] == 144
    watch.check(dense, {0: whole(ids, got.tokens["hit"])})
    other = make(heads["plain"], speculative_fingerprint="h")
    assert other.import_part(chain, HashedTokens(SCOPE, ids, chain.header.hashes, "default"), 0) == 9
    watch = Watch(other)
    assert run_all(other, [request("hit", ids, 12)]).tokens == got.tokens
    watch.check(dense, {0: whole(ids, got.tokens["hit"])})
    for stranger in (make(), make(heads["few_tokens"], speculative_fingerprint="g")):
        with pytest.raises(FormatMismatch, match="parts"):
            stranger.import_part(chain, HashedTokens(SCOPE, ids, chain.header.hashes, "default"), 0)


def test_adapters_and_a_head_go_together(base: Path, heads: dict[str, Path], make: MakeEagle, tmp_path: Path) -> None:
    """The head reads states that the request's adapter made, under the adapter's own scope; answers stay plain."""
    spec, scope = described(save_adapter(base, tmp_path / "a", 1))
    scopes = [PrefixScope("tiny"), scope]
    engines = [make(), make(heads["plain"])]
    for engine in engines:
        engine.load_adapter(spec)
    for turn in range(2):
        wanted = [request(f"{turn}r{i}", prompt(40, i // 2), 20, scope=scopes[i % 2]) for i in range(4)]
        plain, got = (run_all(engine, wanted) for engine in engines)
        assert got.tokens == plain.tokens
        assert got.cached == plain.cached
    assert sample(engines[1], "warmpath_spec_decode_num_draft_tokens_total") > 0


def test_broken_states_harm_nobody(base: Path, heads: dict[str, Path], make: MakeEagle) -> None:
    """A head whose numbers are none proposes nothing; the base's answer is what it would be."""
    engine = make(heads["plain"])
    runner = engine._runner
    assert isinstance(runner, SpeculativeRunner)
    runner.drafter._head.norm.weight.data[:] = float("nan")  # type: ignore[attr-defined]
    got = run_all(engine, [request("r", prompt(30), 20)])
    assert got.tokens == run_all(make(), [request("r", prompt(30), 20)]).tokens
    assert sample(engine, "warmpath_spec_decode_num_drafts_total") == 0
