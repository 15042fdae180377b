"""Speculation changes how many steps an answer takes, never the answer, whatever drafts; its KV is the base's mate.

Of the drafters, "same" is a copy of the base, "close" often agrees, "far" hardly ever; the others are EAGLE-3 heads,
whose guesses are compared with the published formulas.
"""

import random
from collections.abc import Callable, Sequence
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
from serve_app.engine.speculative.eagle_drafter import EagleDrafter
from serve_app.engine.speculative.runner import SpeculativeRunner
from serve_app.engine.step import Segment
from tests.serve_app.engine.adapters import described, save_adapter
from tests.serve_app.engine.speculative.heads import DenseHead, save_base, save_head
from tests.serve_app.engine.tiny import SCOPE, SECRET, VOCAB, prompt, request, run_all, sample, save_draft

MODELS = {"same": 0.0, "close": 0.05, "far": 3.0}
HEADS: dict[str, dict[str, Any]] = {
    "head": {},
    "bare_residual": {"norm_before_residual": None, "fused": 0.005},
    "few_tokens": {"draft_vocab": 150, "layer": "layers.0"},
}

Make = Callable[..., TorchEngine]
Watching = Callable[[TorchEngine, str], "Watch"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def drafters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    models = {name: save_draft(base, tmp_path_factory.mktemp(name), noise) for name, noise in MODELS.items()}
    return models | {name: save_head(base, tmp_path_factory.mktemp(name), **how) for name, how in HEADS.items()}


@pytest.fixture
def watching(base: Path, drafters: dict[str, Path]) -> Watching:
    return lambda engine, name: Watch(engine, base, drafters[name])


@pytest.fixture
def make(base: Path, drafters: dict[str, Path], engines: list[TorchEngine]) -> Make:
    def build(drafter: str = "", **overrides: Any) -> TorchEngine:
        values = {"dtype": "float32", "num_blocks": 256, "max_num_seqs": 16, "max_num_batched_tokens": 64, **overrides}
        if drafter:
            values = {"num_speculative_tokens": 4, **values, "speculative_model": str(drafters[drafter])}
        engine = build_engine(base, EngineSettings(**values), lambda _: None)
        engines.append(engine)
        engine.start()
        return engine

    return build


def counted(engine: TorchEngine, name: str) -> float:
    return sample(engine, f"warmpath_spec_decode_{name}_total")


def acceptance(engine: TorchEngine) -> float:
    return counted(engine, "num_accepted_tokens") / max(counted(engine, "num_draft_tokens"), 1.0)


def runner_of(engine: TorchEngine) -> SpeculativeRunner:
    assert isinstance(engine._runner, SpeculativeRunner)
    return engine._runner


def whole(ids: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    return np.concatenate([ids, np.array(tokens, dtype=np.int32)])


class Watch:
    """Notes what a drafter proposes: (seed of the request, position, guesses)."""

    def __init__(self, engine: TorchEngine, base: Path, drafter: Path) -> None:
        self.seen: list[tuple[int, int, list[int]]] = []
        runner = runner_of(engine)
        self._dense = DenseHead(base, drafter) if isinstance(runner.drafter, EagleDrafter) else None
        propose = runner.drafter.propose

        def noted(segments: Sequence[Segment]) -> list[list[int]]:
            proposals = propose(segments)
            for segment, guesses in zip(segments, proposals, strict=True):
                if guesses and segment.sampling is not None:
                    self.seen.append((segment.sampling.seed, segment.start, list(guesses)))
            return proposals

        runner.drafter.propose = noted  # type: ignore[method-assign]

    def check(self, texts: dict[int, np.ndarray]) -> None:
        """Compare every guess of a head with the dense formulas over the same text, by the request's seed."""
        assert self.seen
        for seed, start, guesses in self.seen if self._dense is not None else ():
            assert guesses == self._dense.guess(texts[seed][: start + 1], len(guesses)), (seed, start)  # type: ignore[union-attr]
        self.seen.clear()


@pytest.mark.parametrize(
    ("name", "ahead"), [("same", 1), ("same", 7), ("close", 4), ("far", 4), *((head, 4) for head in HEADS)]
)
def test_mixed_batches_and_chunks_equal_plain_decoding(name: str, ahead: int, make: Make, watching: Watching) -> None:
    """Prompts of awkward lengths at once, in chunks, cold and warm, whatever the drafter is worth."""
    prompts = {f"p{n}": prompt(n, seed=n) for n in (1, 2, 15, 16, 17, 31, 100, 150)}
    wanted = [request(key, ids, 23, seed=len(ids)) for key, ids in prompts.items()]
    plain = run_all(make(), wanted).tokens
    engine = make(name, num_speculative_tokens=ahead)
    watch = watching(engine, name)
    for turn in ("cold", "warm"):
        got = run_all(engine, wanted)
        assert got.tokens == plain, turn
        assert all(got.cached[key] == (turn == "warm") * ((len(ids) - 1) // 16 * 16) for key, ids in prompts.items())
        watch.check({len(ids): whole(ids, plain[key]) for key, ids in prompts.items()})
    rate = acceptance(engine)
    assert {"same": rate == 1.0, "far": rate < 0.5}.get(name, 0.0 < rate < 1.0), rate


@pytest.mark.parametrize("name", ["same", "close", "head"])
def test_a_hit_at_every_block_boundary_changes_no_token_and_no_guess(name: str, make: Make, watching: Watching) -> None:
    """Whoever filled the blocks left the states and KV that this prompt needs. (docs/speculation.md)"""
    ids = prompt(165)
    expected = run_all(make(), [request("plain", ids, 20)]).tokens["plain"]
    accepted = set()
    for cached in range(0, 11, 1 if name == "head" else 2):
        engine = make(name)
        if cached:
            run_all(engine, [request("warm", whole(ids[: cached * 16], prompt(5, 99)), 9)])
        watch = watching(engine, name)
        before = counted(engine, "num_accepted_tokens")
        got = run_all(engine, [request("hit", ids, 20)])
        assert got.cached["hit"] == cached * 16, "a block keeps all that is needed to go on after it"
        assert got.tokens["hit"] == expected
        watch.check({0: whole(ids, expected)})
        accepted.add(counted(engine, "num_accepted_tokens") - before)
        engine.stop()
    assert len(accepted) == 1


def test_a_draft_that_agrees_takes_a_step_for_five_tokens(make: Make) -> None:
    """Counted at the base model: the prompt's last step gives one token, 63 more come in steps of five."""
    engine = make("same", max_num_batched_tokens=256)
    run_all(engine, [request("alone", prompt(300), 64)])
    assert counted(engine, "base_steps") == 1 + 13
    run_all(engine, [request(f"r{i}", prompt(20 + i, i), 64) for i in range(8)])
    assert counted(engine, "base_steps") == 9 * (1 + 13)
    assert counted(engine, "num_drafts") == 9 * 13
    assert acceptance(engine) == 1.0


@pytest.mark.parametrize("name", ["same", "close", *HEADS])
def test_sampled_output_equals_plain_sampling_token_for_token(name: str, make: Make) -> None:
    """A draft counts only if it is the token that (seed, position) gives. (docs/speculation.md)"""
    hows: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 20},
        {"temperature": 0.0},
        {"temperature": 0.5, "disable_spec_decode": True},
    ]
    wanted = [request(f"r{i}", prompt(10 + 7 * i, i), 30, seed=i, **hows[i % len(hows)]) for i in range(10)]
    engine = make(name)
    assert run_all(engine, wanted).tokens == run_all(make(), wanted).tokens
    assert acceptance(engine) == 1.0 if name == "same" else 0.0 < acceptance(engine) < 1.0


@pytest.mark.parametrize("name", ["same", "head"])
def test_a_request_can_do_without_and_its_blocks_still_draft_well(name: str, make: Make, watching: Watching) -> None:
    """disable_spec_decode: no draft for it; a follow-up on its blocks has as good ones as any."""
    engine, ids = make(name), prompt(40)
    first = run_all(engine, [request("plain", ids, 60, disable_spec_decode=True)]).tokens["plain"]
    assert counted(engine, "num_drafts") == 0
    watch = watching(engine, name)
    turn = whole(ids, [*first, *prompt(3, 8)])
    got = run_all(engine, [request("next", turn, 20), request("off", prompt(9), 20, disable_spec_decode=True)])
    assert got.cached["next"] == 96, "the generated blocks as well"
    assert got.tokens == run_all(make(), [request("next", turn, 20), request("off", prompt(9), 20)]).tokens
    watch.check({0: whole(turn, got.tokens["next"])})
    assert name != "same" or acceptance(engine) == 1.0


@pytest.mark.parametrize("name", ["same", "far", "head"])
def test_a_small_pool_under_churn_evicts_both_and_stays_right(name: str, make: Make, watching: Watching) -> None:
    """Twenty-four requests over six prefixes in a pool for three; drafts need no block beyond what was promised."""
    engine = make(name, num_blocks=24, max_num_seqs=4)
    watch, order = watching(engine, name), random.Random(3)
    prompts = {
        i: whole(prompt(96, seed=100 + order.randrange(6)), prompt(order.randrange(1, 20), i)) for i in range(24)
    }
    wanted = [request(f"r{i}", ids, 9, seed=i) for i, ids in prompts.items()]
    got = run_all(engine, wanted)
    assert got.tokens == run_all(make(), wanted).tokens
    watch.check({i: whole(ids, got.tokens[f"r{i}"]) for i, ids in prompts.items()})
    assert sample(engine, "warmpath_prefix_cache_evicted_blocks_total") > 0
    assert name != "same" or acceptance(engine) == 1.0, "an evicted block's draft KV was never taken for another's"
    assert engine._cache.pool.used_blocks == 0


def test_drafting_stops_in_time_for_max_tokens(make: Make) -> None:
    """Answers of few tokens, and one that ends with its block, in a pool of exactly the blocks they need."""
    expected = run_all(make(), [request("plain", prompt(31), 17)]).tokens["plain"]
    for tokens in (0, 1, 2, 3, 5, 6, 7, 17):
        engine = make("same", num_blocks=-(-(31 + tokens) // 16), max_num_seqs=1)
        assert run_all(engine, [request("r", prompt(31), tokens)]).tokens["r"] == expected[:tokens]
        engine.stop()


def test_a_guess_that_is_no_number_harms_nobody(make: Make) -> None:
    """A drafter that proposes a token whose embedding is broken in the base: output as if it had said nothing."""
    wanted = [request(f"r{i}", prompt(30, i), 20) for i in range(3)]
    expected = run_all(make(), wanted).tokens
    engine = make("same", num_blocks=16, max_num_seqs=2)
    runner = runner_of(engine)
    used = {int(token) for i in range(3) for token in (*prompt(30, i), *expected[f"r{i}"])}
    poison = min(set(range(VOCAB)) - used)
    runner.model.get_input_embeddings().weight.data[poison] = float("nan")  # type: ignore[operator]
    propose = runner.drafter.propose

    def poisoned(segments: Sequence[Segment]) -> list[list[int]]:
        return [[*drafts[:2], poison, *drafts[3:]] if len(drafts) > 2 else drafts for drafts in propose(segments)]

    runner.drafter.propose = poisoned  # type: ignore[method-assign]
    got = run_all(engine, wanted)
    assert got.tokens == expected
    assert set(got.finish.values()) == {"length"}


@pytest.mark.parametrize("name", ["same", "head"])
def test_a_drafter_that_fails_leaves_plain_decoding(name: str, make: Make) -> None:
    """A drafter whose logits are no numbers proposes nothing. (docs/speculation.md)"""
    engine = make(name)
    drafter: Any = runner_of(engine).drafter
    norm = drafter._head.norm if name == "head" else drafter.runner.model.model.norm
    norm.weight.data[:] = float("nan")
    wanted = [request("r", prompt(30), 20)]
    assert run_all(engine, wanted).tokens == run_all(make(), wanted).tokens
    assert counted(engine, "num_drafts") == 0


@pytest.mark.parametrize(("name", "other"), [("same", "head"), ("head", "few_tokens")])
def test_what_a_drafter_keeps_goes_down_up_and_across_with_the_bases_kv(
    name: str, other: str, make: Make, watching: Watching
) -> None:
    """Through host memory and to another engine; an engine with another drafter, or none, takes none of it."""
    ids = prompt(150)
    tiers = TierSettings(host_bytes=8 << 20, load_ratio=1e9)
    engine = make(name, tiers=tiers, num_blocks=24, max_num_seqs=4, speculative_fingerprint="h")
    run_all(engine, [request("warm", ids, 1)])
    chain = engine.export_prefix(HashedTokens(SCOPE, ids, hash_blocks(SCOPE.root(SECRET), ids, 16)))
    assert chain is not None
    assert {part.model for part in chain.header.format.parts[1:]} == {"h"}
    for i in range(2):
        run_all(engine, [request(f"churn{i}", prompt(300, 10 + i), 1)])
    runner = runner_of(engine)
    assert runner.block_bytes * 24 == sum(pool.nbytes for pool in runner.pools)
    for pool in runner.pools[1:]:
        pool.zero_()
    second = make(name, speculative_fingerprint="h")
    hashed = HashedTokens(SCOPE, ids, chain.header.hashes, "default")
    assert second.import_part(chain, hashed, 0) == 9
    for holder in (engine, second):
        watch = watching(holder, name)
        got = run_all(holder, [request("hit", ids, 12)])
        assert got.cached["hit"] == 144
        watch.check({0: whole(ids, got.tokens["hit"])})
        assert name != "same" or holder is engine or acceptance(holder) == 1.0
    for stranger in (make(), make(other, speculative_fingerprint="g")):
        with pytest.raises(FormatMismatch, match="parts"):
            stranger.import_part(chain, hashed, 0)


@pytest.mark.parametrize("name", ["same", "head"])
def test_adapters_and_a_drafter_go_together(name: str, make: Make, base: Path, tmp_path: Path) -> None:
    """A model drafts without the adapter, a head reads the states it made; answers and scopes stay the plain ones."""
    spec, scope = described(save_adapter(base, tmp_path / "a", 1))
    scopes = [PrefixScope("tiny"), scope]
    engines = [make(), make(name)]
    for engine in engines:
        engine.load_adapter(spec)
    for turn in range(2):
        wanted = [request(f"{turn}r{i}", prompt(40, i // 2), 20, scope=scopes[i % 2]) for i in range(4)]
        plain, got = (run_all(engine, wanted) for engine in engines)
        assert got.tokens == plain.tokens
        assert got.cached == plain.cached
    assert counted(engines[1], "num_draft_tokens") > 0
