"""Speculation changes how many steps an answer takes, never the answer (fp32), and its KV is cached with the base's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serve_app.engine.attention.paging import PagedStep
from serve_app.engine.core.build import build_engine
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.settings import EngineSettings
from serve_app.engine.speculative.runner import SpeculativeRunner, accept
from serve_app.engine.step import Segment, SegmentResult
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.tiny import VOCAB, Collector, prompt, request, run_all, save_draft

NOISE = {"same": 0.0, "close": 0.05, "far": 3.0}


@pytest.fixture(scope="session")
def drafts(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Draft models of the tiny Qwen3: its copy, one that often agrees, one that hardly ever does."""
    return {
        name: str(save_draft(checkpoints["qwen3"], tmp_path_factory.mktemp(name), noise))
        for name, noise in NOISE.items()
    }


def sample(engine: TorchEngine, name: str) -> float:
    return sum(value for have, _, value in engine.stats().samples if have == f"warmpath_{name}")


def acceptance(engine: TorchEngine) -> float:
    """Return accepted / proposed tokens."""
    drafted = sample(engine, "spec_decode_num_draft_tokens_total")
    return sample(engine, "spec_decode_num_accepted_tokens_total") / max(drafted, 1.0)


class Steps:
    """Counts a runner's steps, and each sequence's share of those that decode."""

    def __init__(self, engine: TorchEngine) -> None:
        runner = engine._runner
        assert isinstance(runner, SpeculativeRunner)
        self.base = 0
        forward = runner.forward

        def counted(step: PagedStep) -> torch.Tensor:
            self.base += 1
            return forward(step)

        runner.forward = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("draft", NOISE)
@pytest.mark.parametrize("ahead", [1, 4, 7])
def test_mixed_batches_and_chunks_equal_plain_decoding(
    draft: str, ahead: int, make_engine: MakeEngine, reference: Reference, drafts: dict[str, str]
) -> None:
    """Prompts of awkward lengths at once, in chunks, cold and warm, whatever the drafter is worth."""
    prompts = {f"p{n}": prompt(n, seed=n) for n in (1, 15, 16, 17, 31, 100, 300)}
    engine = make_engine(speculative_model=drafts[draft], num_speculative_tokens=ahead, max_num_batched_tokens=64)
    for turn in ("cold", "warm"):
        got = run_all(engine, [request(name, ids, 23) for name, ids in prompts.items()])
        for name, ids in prompts.items():
            assert got.tokens[name] == reference("qwen3", ids, 23), (turn, name)
            assert got.cached[name] == (0 if turn == "cold" else (len(ids) - 1) // 16 * 16)
    rate = acceptance(engine)
    assert {"same": rate == 1.0, "close": 0.3 < rate < 1.0, "far": rate < 0.3}[draft], rate


@pytest.mark.parametrize("draft", ["same", "close"])
def test_a_hit_at_every_block_boundary_changes_no_token_and_no_acceptance(
    draft: str, make_engine: MakeEngine, reference: Reference, drafts: dict[str, str]
) -> None:
    """A cached prefix brings its draft KV along: drafts after a hit are those after a cold prompt."""
    ids = prompt(165)
    expected = reference("qwen3", ids, 24)
    accepted = []
    for cached in range(0, 11, 2 if draft == "close" else 1):
        engine = make_engine(speculative_model=drafts[draft], num_speculative_tokens=4)
        if cached:
            run_all(engine, [request("warm", ids[: cached * 16], 1)])
        got = run_all(engine, [request("hit", ids, 24)])
        assert got.cached["hit"] == cached * 16
        assert got.tokens["hit"] == expected
        accepted.append((sample(engine, "spec_decode_num_accepted_tokens_total"), acceptance(engine)))
        engine.stop()
    assert len(set(accepted)) == 1


def test_a_draft_that_agrees_takes_a_third_of_the_steps_at_most(
    make_engine: MakeEngine, drafts: dict[str, str]
) -> None:
    """The bar: base steps per token <= 0.35, counted at the base model, alone and in a batch."""
    engine = make_engine(speculative_model=drafts["same"], num_speculative_tokens=4)
    steps = Steps(engine)
    run_all(engine, [request("alone", prompt(40), 64)])
    assert steps.base / 64 <= 0.35
    # The prompt's step gives one token; 63 more come in steps of five.
    assert steps.base == 1 + 13
    assert sample(engine, "spec_decode_base_steps_total") == steps.base
    steps.base = 0
    run_all(engine, [request(f"r{i}", prompt(20 + i, i), 64) for i in range(8)])
    assert steps.base / 64 <= 0.35, "eight sequences verified together take no more steps than one"
    assert sample(engine, "spec_decode_num_draft_tokens_total") == sample(
        engine, "spec_decode_num_accepted_tokens_total"
    )
    assert sample(engine, "spec_decode_num_drafts_total") == 9 * 13


@pytest.mark.parametrize("draft", ["same", "close"])
def test_sampled_output_equals_plain_sampling_token_for_token(
    draft: str, make_engine: MakeEngine, drafts: dict[str, str]
) -> None:
    """At any temperature a draft counts only if it is the token that (seed, position) gives: nothing to preserve
    in distribution, the very tokens are the same. And the drafter, given the same number, often finds it.

    docs/speculation.md
    """
    hows: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 20},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_p": 0.95, "top_k": 50},
    ]
    requests = [request(f"r{i}", prompt(10 + 7 * i, i), 40, seed=i, **hows[i % len(hows)]) for i in range(10)]
    plain = run_all(make_engine(), requests)
    engine = make_engine(speculative_model=drafts[draft], num_speculative_tokens=3)
    assert run_all(engine, requests).tokens == plain.tokens
    assert acceptance(engine) == 1.0 if draft == "same" else 0.2 < acceptance(engine) < 1.0


def test_a_resend_goes_on_identically(make_engine: MakeEngine, drafts: dict[str, str]) -> None:
    """What a lost replica had generated comes back as prompt, cut anywhere in a draft: the rest is the same.

    docs/speculation.md
    """
    ids = prompt(37)
    how: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    engine = make_engine(speculative_model=drafts["close"], num_speculative_tokens=4)
    whole = run_all(engine, [request("whole", ids, 24, **how)]).tokens["whole"]
    for cut in range(1, 12):
        resent = np.concatenate([ids, np.array(whole[:cut], dtype=np.int32)])
        got = run_all(engine, [request(f"cut{cut}", resent, 24 - cut, **how)])
        assert got.tokens[f"cut{cut}"] == whole[cut:], cut


def test_a_request_can_do_without_and_its_blocks_still_carry_both(
    make_engine: MakeEngine, reference: Reference, drafts: dict[str, str]
) -> None:
    """disable_spec_decode: no draft for it, next to others that have them; a follow-up on its blocks drafts well."""
    engine = make_engine(speculative_model=drafts["same"], num_speculative_tokens=4)
    ids = prompt(40)
    got = run_all(engine, [request("plain", ids, 60, disable_spec_decode=True)])
    assert got.tokens["plain"] == reference("qwen3", ids, 60)
    assert sample(engine, "spec_decode_num_drafts_total") == 0
    turn = np.concatenate([ids, np.array(got.tokens["plain"], dtype=np.int32), prompt(3, 8)])
    others = [request("next", turn, 30), request("off", prompt(9), 30, disable_spec_decode=True)]
    got = run_all(engine, others)
    assert got.cached["next"] == 96, "the generated blocks as well"
    assert got.tokens["next"] == reference("qwen3", turn, 30)
    assert got.tokens["off"] == reference("qwen3", prompt(9), 30)
    assert acceptance(engine) == 1.0


def test_generated_blocks_are_reused_with_their_draft_kv(
    make_engine: MakeEngine, reference: Reference, drafts: dict[str, str]
) -> None:
    """Conversations of any length: as many blocks are cached as without speculation, and drafts stay right."""
    engine = make_engine(speculative_model=drafts["same"], num_speculative_tokens=4)
    for tokens in (7, 24, 25, 26, 40):
        ids = prompt(40, tokens)
        first = run_all(engine, [request(f"one{tokens}", ids, tokens)]).tokens[f"one{tokens}"]
        turn = np.concatenate([ids, np.array(first, dtype=np.int32), prompt(5, 9)])
        got = run_all(engine, [request(f"two{tokens}", turn, 9)])
        assert got.cached[f"two{tokens}"] == (40 + tokens - 1) // 16 * 16
        assert got.tokens[f"two{tokens}"] == reference("qwen3", turn, 9)
    assert acceptance(engine) == 1.0


@pytest.mark.parametrize("draft", ["same", "far"])
def test_a_small_pool_under_churn_evicts_both_and_stays_right(
    draft: str, make_engine: MakeEngine, reference: Reference, drafts: dict[str, str]
) -> None:
    """Twenty-four requests over six prefixes in a pool for three; drafts need no block beyond what was promised."""
    engine = make_engine(
        speculative_model=drafts[draft],
        num_speculative_tokens=4,
        num_blocks=24,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    order = random.Random(3)
    prompts = {}
    for i in range(24):
        base = prompt(96, seed=100 + order.randrange(6))
        prompts[f"r{i}"] = np.concatenate([base, prompt(order.randrange(1, 20), seed=i)])
    got = run_all(engine, [request(name, ids, 9) for name, ids in prompts.items()])
    for name, ids in prompts.items():
        assert got.tokens[name] == reference("qwen3", ids, 9), name
    assert sample(engine, "prefix_cache_evicted_blocks_total") > 0
    assert draft == "far" or acceptance(engine) == 1.0, "an evicted block's draft KV was never taken for another's"


def test_a_stop_token_inside_a_draft_ends_the_answer_there(
    make_engine: MakeEngine, reference: Reference, drafts: dict[str, str]
) -> None:
    expected = reference("qwen3", prompt(20), 20)
    engine = make_engine(speculative_model=drafts["same"], num_speculative_tokens=4)
    for i in range(1, 12):
        stop = expected[i]
        got = run_all(engine, [request(f"s{i}", prompt(20), 20, stop_token_ids=(stop,))])
        assert got.tokens[f"s{i}"] == expected[: expected.index(stop)]
        assert got.finish[f"s{i}"] == "stop"
    assert engine._cache.pool.used_blocks == 0


def test_drafting_stops_in_time_for_max_tokens(
    make_engine: MakeEngine, reference: Reference, drafts: dict[str, str]
) -> None:
    """Answers of few tokens, and one that ends with its block, in a pool of exactly the blocks they need."""
    for tokens in (0, 1, 2, 3, 5, 6, 7, 17):
        blocks = -(-(31 + tokens) // 16)
        engine = make_engine(
            speculative_model=drafts["same"], num_speculative_tokens=4, num_blocks=blocks, max_num_seqs=1
        )
        got = run_all(engine, [request("r", prompt(31), tokens)])
        assert got.tokens["r"] == (reference("qwen3", prompt(31), tokens) if tokens else [])
        engine.stop()


def test_a_cancelled_request_frees_its_blocks(make_engine: MakeEngine, drafts: dict[str, str]) -> None:
    engine = make_engine(speculative_model=drafts["same"], num_speculative_tokens=4)
    collector = Collector()
    engine.submit(request("gone", prompt(20), 900), collector)
    collector.wait_tokens("gone", 20)
    engine.cancel("gone")
    collector.wait(["gone"])
    assert collector.finish["gone"] == "cancelled"
    assert engine._cache.pool.used_blocks == 0


def test_a_guess_that_is_no_number_harms_nobody(
    make_engine: MakeEngine, reference: Reference, drafts: dict[str, str]
) -> None:
    """A drafter that proposes a token whose embedding is broken in the base: output as if it had said nothing."""
    engine = make_engine(speculative_model=drafts["same"], num_speculative_tokens=4, num_blocks=16, max_num_seqs=2)
    runner = engine._runner
    assert isinstance(runner, SpeculativeRunner)
    expected = {f"r{i}": reference("qwen3", prompt(30, i), 20) for i in range(3)}
    used = {int(token) for i in range(3) for token in (*prompt(30, i), *expected[f"r{i}"])}
    poison = min(set(range(VOCAB)) - used)
    runner.model.get_input_embeddings().weight.data[poison] = float("nan")
    propose = runner.drafter.propose

    def poisoned(segments: Sequence[Segment]) -> list[list[int]]:
        return [[*drafts[:2], poison, *drafts[3:]] if len(drafts) > 2 else drafts for drafts in propose(segments)]

    runner.drafter.propose = poisoned  # type: ignore[method-assign]
    got = run_all(engine, [request(name, prompt(30, i), 20) for i, name in enumerate(expected)])
    assert got.tokens == expected
    assert set(got.finish.values()) == {"length"}


def test_a_drafter_that_fails_leaves_plain_decoding(
    make_engine: MakeEngine, reference: Reference, drafts: dict[str, str]
) -> None:
    """A draft model whose logits are no numbers proposes nothing. (docs/speculation.md)"""
    engine = make_engine(speculative_model=drafts["same"], num_speculative_tokens=4)
    runner = engine._runner
    assert isinstance(runner, SpeculativeRunner)
    runner.drafter.runner.model.get_input_embeddings().weight.data[:] = float("nan")  # type: ignore[attr-defined]
    got = run_all(engine, [request("r", prompt(30), 20)])
    assert got.tokens["r"] == reference("qwen3", prompt(30), 20)
    assert sample(engine, "spec_decode_num_drafts_total") == 0


def test_bytes_are_both_pools(make_engine: MakeEngine, drafts: dict[str, str]) -> None:
    engine = make_engine(speculative_model=drafts["same"], num_speculative_tokens=4)
    runner = engine._runner
    assert isinstance(runner, SpeculativeRunner)
    tensors = runner.pools
    assert len(tensors) == 2
    assert runner.block_bytes * 256 == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_without_a_drafter_nothing_is_counted_and_no_segment_asks(make_engine: MakeEngine) -> None:
    engine = make_engine()
    asked: list[Segment] = []
    execute = engine._runner.execute

    def watched(segments: Sequence[Segment]) -> list[SegmentResult]:
        asked.extend(segments)
        return execute(segments)

    engine._runner.execute = watched  # type: ignore[method-assign]
    run_all(engine, [request("r", prompt(30), 5)])
    assert not any(segment.drafts or segment.behind is not None for segment in asked)
    assert not any(name.startswith("warmpath_spec_decode") for name, _, _ in engine.stats().samples)


def test_models_that_do_not_fit_are_refused_at_load(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Another vocabulary, or too few positions: an error that names both models."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config.from_pretrained(checkpoints["qwen3"])
    for name, changes in {"vocabulary": {"vocab_size": 200}, "positions": {"max_position_embeddings": 512}}.items():
        changed = Qwen3Config.from_dict({**config.to_dict(), **changes})
        Qwen3ForCausalLM(changed).save_pretrained(tmp_path / name)
        settings = EngineSettings(
            num_blocks=8, dtype="float32", speculative_model=str(tmp_path / name), num_speculative_tokens=2
        )
        with pytest.raises(ValueError, match=name) as refused:
            build_engine(checkpoints["qwen3"], settings, lambda _: None)
        assert str(tmp_path / name) in str(refused.value)
        assert str(checkpoints["qwen3"]) in str(refused.value)


def test_acceptance_stops_at_the_first_difference() -> None:
    verdicts = [SegmentResult(token=token) for token in (4, 5, 6, 7)]
    plain = SegmentResult(token=4)
    assert accept([plain], []) == plain
    assert accept(verdicts, [4, 5, 6]) == replace(verdicts[3], accepted=(4, 5, 6), proposed=3)
    assert accept(verdicts, [4, 9, 6]) == replace(verdicts[1], accepted=(4,), proposed=3)
    assert accept(verdicts, [9, 5, 6]) == replace(verdicts[0], accepted=(), proposed=3)
