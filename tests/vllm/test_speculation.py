"""Drafts in vLLM, of the text itself or a drafter: the tokens and the directory are those without drafts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import save_file
from transformers import Glm4MoeConfig

from benchmarks.common.random_drafter import make_eagle_head
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import RequestTooLong, Save, TokenRules
from serve_app.engine.vllm.engine import VllmEngine
from serve_app.engine.vllm.transfer.job import LAYOUT_FILE
from serve_app.replica.engine_factory import make_engine
from serve_app.structured.compiler import GrammarCompiler, llguidance_form
from serve_app.structured.grammar import Grammar
from serve_app.structured.matcher import Matchers
from tests.harness.eventually import eventually
from tests.router.vllm_events.pool_model import Routers
from tests.serve_app.engine.adapters import described, save_adapter
from tests.serve_app.engine.tiny import request, run_all
from tests.vllm.engines import BLOCK, Both, both_engines, compute, outputs_of, prefix_of, reset, tokens_of


@pytest.fixture(scope="module")
def both(demo_model_path: Path) -> Iterator[Both]:
    with both_engines(demo_model_path, speculative_model="ngram", num_speculative_tokens=3) as running:
        yield running


@pytest.fixture(scope="module")
def eagle(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """A drafter that reads the model's states and the next token; saves may keep all but 62 blocks."""
    head = make_eagle_head(demo_model_path, tmp_path_factory.mktemp("eagle") / "head")
    drafting = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
    with both_engines(demo_model_path, speculative_config=drafting, pin_budget=34) as running:
        yield running


@pytest.fixture(scope="module")
def eagle3(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """A drafter that reads states of three layers and drafts half of the vocabulary."""
    head = make_eagle_head(demo_model_path, tmp_path_factory.mktemp("eagle3") / "head", draft_vocab_size=2048)
    drafting = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    with both_engines(demo_model_path, speculative_config=drafting) as running:
        yield running


@pytest.fixture(scope="module")
def twin(demo_model_path: Path) -> Iterator[Both]:
    """The model drafts for itself, so that every draft is right as long as the drafter's KV is."""
    drafting = {"method": "draft_model", "model": str(demo_model_path), "num_speculative_tokens": 3}
    with both_engines(demo_model_path, speculative_config=drafting) as running:
        yield running


@pytest.fixture
def drafter(request: pytest.FixtureRequest) -> Both:
    """The engines of the fixture with the parameter's name."""
    found: Both = request.getfixturevalue(request.param)
    return found


def drafts(both: Both) -> tuple[float, float]:
    """Return the tokens drafted in vLLM so far, and the accepted ones."""
    counts = {name.removeprefix("warmpath_spec_decode_num_"): value for name, _, value in both.vllm.stats().samples}
    return counts.get("draft_tokens_total", 0.0), counts.get("accepted_tokens_total", 0.0)


def repetitive(both: Both, length: int, seed: int = 0) -> Any:
    return np.resize(both.prompt(7, seed), length)


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "nearly greedy": {"temperature": 0.05, "seed": 5},
    "filtered": {"temperature": 0.7, "top_k": 2, "top_p": 0.9, "seed": 3},
    "min_p": {"temperature": 1.2, "min_p": 0.5, "seed": 11},
    "penalties": {"temperature": 0.3, "seed": 5, "rules": TokenRules(0.1, 0.1, 1.05)},
    "bias": {"rules": TokenRules(logit_bias=((5, 100.0),))},
    "bad words": {"rules": TokenRules(logit_bias=((5, 100.0), (6, 99.0)), bad_words=((5,) * 6,))},
    "at least": {"stop_token_ids": (5,), "rules": TokenRules(logit_bias=((5, 100.0), (6, 99.0)), min_tokens=20)},
    "logprobs": {"temperature": 0.1, "seed": 9, "logprobs": 3},
}


@pytest.mark.parametrize("drafter", ["both", "eagle", "eagle3"], indirect=True)
def test_tokens_are_those_without_drafts_alone_in_a_batch_and_from_the_middle(drafter: Both) -> None:
    """Greedy, seeded, under rules: the built-in engine has no drafts, vLLM accepts some in each batch."""
    both = drafter
    ids = repetitive(both, 90)
    asked = [request(name, ids, 60, **sampling) for name, sampling in SAMPLED.items()]
    wanted = run_all(both.torch, asked).tokens
    assert run_all(both.vllm, asked).tokens == wanted
    assert drafts(both)[1] > 0
    for name, sampling in SAMPLED.items():
        assert tokens_of(both.vllm, name, ids, max_tokens=60, **sampling) == wanted[name], name
        begun = request(name, np.concatenate([ids, np.array(wanted[name][:10], dtype=np.int32)]), 50, **sampling)
        assert run_all(both.vllm, [structs.replace(begun, resumed_tokens=10)]).tokens[name] == wanted[name][10:], name


def test_logprobs_are_given_for_drafts_too(both: Both) -> None:
    """There are as many as tokens, and they equal the built-in engine's."""
    asked = request("r", repetitive(both, 60), 40, logprobs=3, rules=TokenRules(logit_bias=((5, 100.0),)))
    before = drafts(both)[1]
    ours, theirs = (
        [told for output in outputs_of(engine, asked) for told in output.logprobs] for engine in (both.torch, both.vllm)
    )
    assert drafts(both)[1] > before
    assert len(ours) == len(theirs) == 40
    assert [told.logprob for told in theirs] == pytest.approx([told.logprob for told in ours], abs=1e-3)
    assert [[token for token, _ in told.top] for told in theirs] == [[token for token, _ in told.top] for told in ours]


def test_listed_tokens_are_told_for_drafts_too(both: Both) -> None:
    """Beside a request that asks for the likeliest ones."""
    rules = TokenRules(logit_bias=((5, 100.0),))
    asked = [
        request(name, repetitive(both, 60), 40, logprobs=2, logprob_token_ids=listed, rules=rules)
        for name, listed in (("listed", (9, 8, 7)), ("likeliest", ()))
    ]
    before = drafts(both)[1]
    ours, theirs = (run_all(engine, asked).logprobs for engine in (both.torch, both.vllm))
    assert drafts(both)[1] > before
    for name in ours:
        assert len(ours[name]) == len(theirs[name]) == 40
        for own, other in zip(ours[name], theirs[name], strict=True):
            assert [token for token, _ in other.top] == [token for token, _ in own.top]
            assert [value for _, value in other.top] == pytest.approx([value for _, value in own.top], abs=1e-3)
    assert [token for token, _ in theirs["listed"][0].top] == [5, 9, 8, 7]


def test_a_grammar_holds_at_every_draft(both: Both) -> None:
    """Drafts that violate it are never accepted, those that follow it are."""
    matchers = Matchers(GrammarCompiler(both.info.path, both.info.vocab_size, both.info.eos_token_ids))
    text = llguidance_form(Grammar.regex(r"(red|green|blue)(, (red|green|blue)){12}", "regex"))
    ends = both.info.eos_token_ids

    def asked(name: str, seed: int) -> Any:
        wanted = request(name, repetitive(both, 50), 80, temperature=0.3, seed=seed, stop_token_ids=ends)
        return structs.replace(wanted, matcher=matchers.matcher(text))

    before = drafts(both)
    names = [asked(f"r{seed}", seed) for seed in range(4)]
    wanted, found = run_all(both.torch, names), run_all(both.vllm, names)
    assert found.tokens == wanted.tokens
    assert found.finish == wanted.finish
    proposed, accepted = (now - then for now, then in zip(drafts(both), before, strict=True))
    assert 0 < accepted < proposed


def test_a_request_without_drafts_has_none(both: Both) -> None:
    """This holds beside others that have some."""
    sampling: dict[str, Any] = {"rules": TokenRules(logit_bias=((5, 100.0),)), "disable_spec_decode": True}
    before = drafts(both)
    alone = tokens_of(both.vllm, "r", repetitive(both, 60), max_tokens=30, **sampling)
    assert drafts(both) == before
    assert alone == tokens_of(both.torch, "r", repetitive(both, 60), max_tokens=30, **sampling)


@pytest.mark.parametrize("drafter", ["both", "eagle"], indirect=True)
def test_the_directory_predicts_the_delivered_tokens(drafter: Both) -> None:
    """Conversations grow in a pool that evicts; prompts with only a new last token run beside others' drafts."""
    both = drafter
    random, wrong, hits = np.random.default_rng(3), [], 0
    talks = [repetitive(both, 40 + 50 * i, i) for i in range(6)]
    before = drafts(both)[1]
    for number in range(120):
        which = int(random.integers(len(talks)))
        ids = talks[which]
        compute(both, both.prompt(BLOCK + 1, seed=5000 + number), max_tokens=1)  # its events come last
        predicted = BLOCK * both.vllm.cached_blocks(prefix_of(ids).chain, (len(ids) - 1) // BLOCK)
        name = f"talk {number}"
        rules = TokenRules(logit_bias=((which, 100.0),)) if number % 3 else None
        found = run_all(both.vllm, [request(name, ids, 30, tenant=f"t{which % 2}", temperature=0.1, rules=rules)])
        hits += found.cached[name] > 0
        if found.cached[name] != predicted:
            wrong.append((name, predicted, found.cached[name]))
        more = np.concatenate([ids, np.array(found.tokens[name], dtype=np.int32), repetitive(both, 30, number)])
        end = BLOCK * (len(more) // BLOCK) + 1 - BLOCK * (number % 2)  # half of them: one token beyond a block
        talks[which] = more[:end] if len(more) < 700 else repetitive(both, 40, 1000 + number)
    assert drafts(both)[1] > before
    assert hits > 40
    assert wrong == []


@pytest.mark.parametrize("drafter", ["both", "eagle", "eagle3", "twin"], indirect=True)
def test_a_prompts_last_token_alone_goes_with_a_turn_of_its_tenant(drafter: Both) -> None:
    """vLLM pads it with space for drafts, and stops for good if a turn cuts that."""
    both = drafter
    ids = both.prompt(2 * BLOCK + 1, seed=77)
    _, tokens = compute(both, ids)
    again = run_all(both.vllm, [request(name, ids, 8, tenant=name) for name in ("a", "b")])
    assert (
        again.tokens == {"a": tokens, "b": tokens} == run_all(both.torch, [request(n, ids) for n in ("a", "b")]).tokens
    )
    assert again.cached == {"a": 2 * BLOCK, "b": 2 * BLOCK}


LENGTHS = (BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 500, 32 * BLOCK + 1)


@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "twin"], indirect=True)
def test_a_repeated_prompt_finds_as_much_as_without_drafts(drafter: Both) -> None:
    """All whole blocks before its last token; the answer is the one without drafts."""
    both = drafter
    before, found = drafts(both)[0], {}
    for length in LENGTHS:
        ids = both.prompt(length, seed=length)
        _, tokens = compute(both, ids)
        again = run_all(both.vllm, [request("again", ids)])
        assert again.tokens["again"] == tokens == tokens_of(both.torch, "again", ids)
        found[length] = again.cached["again"]
    assert found == {length: (length - 1) // BLOCK * BLOCK for length in LENGTHS}
    assert drafts(both)[0] > before


def test_another_token_after_a_block_is_another_draft_and_the_same_answer(eagle: Both) -> None:
    """The drafter's KV of the block's last token is then of the earlier prompt; the hit keeps the block."""
    ids = eagle.prompt(3 * BLOCK, seed=41)
    compute(eagle, np.concatenate([ids, eagle.prompt(5, seed=42)]))
    other = np.concatenate([ids, eagle.prompt(9, seed=43)])
    found = run_all(eagle.vllm, [request("other", other, 20)])
    assert found.cached["other"] == 3 * BLOCK
    assert found.tokens["other"] == tokens_of(eagle.torch, "other", other, max_tokens=20)


def accepted_after(both: Both, name: str, ids: Any) -> tuple[float, list[int], int]:
    """Return the part of the drafts that an answer accepted, its tokens and its cached tokens."""
    before = drafts(both)
    found = run_all(both.vllm, [request(name, ids, 1 + 4 * 5)])
    proposed, accepted = (now - then for now, then in zip(drafts(both), before, strict=True))
    return accepted / proposed, found.tokens[name], found.cached[name]


def test_a_drafters_kv_is_computed_found_and_copied_with_the_models(twin: Both) -> None:
    """All drafts are right after a cold start, a hit, and a copy from a peer into an empty pool."""
    ids = twin.prompt(10 * BLOCK + 7, seed=51)
    cold = accepted_after(twin, "cold", ids)
    prefix = prefix_of(ids)
    eventually(lambda: twin.vllm.cached_blocks(prefix.chain, 10) == 10)
    warm = accepted_after(twin, "warm", ids)
    part = twin.vllm.transfer.export_prefix(prefix)
    assert part is not None
    assert part.header.blocks == 10
    reset(twin)
    assert twin.vllm.transfer.import_part(part, prefix, 0) == 10
    copied = accepted_after(twin, "copied", ids)
    assert cold == (1.0, cold[1], 0)
    assert warm == copied == (1.0, cold[1], 10 * BLOCK)


def test_a_save_beside_drafts_outlives_a_flood_and_leaves_space_for_them(eagle: Both) -> None:
    """A request that fits beside all saves, but not with its drafts too, is refused: it would wait for ever."""
    ids = eagle.prompt(34 * BLOCK + 1, seed=61)
    saved = structs.replace(request("save", ids), saves=(Save(b"s" * 16, 34 * BLOCK),))
    first = next(output.first for output in outputs_of(eagle.vllm, saved) if output.first is not None)
    assert first.save is not None and first.save.outcome == "saved"
    with pytest.raises(RequestTooLong):
        eagle.vllm.submit(request("long", eagle.prompt(62 * BLOCK - 8, seed=62), 8), lambda outputs: None)
    for seed in (63, 64):
        tokens_of(eagle.vllm, "flood", eagle.prompt(61 * BLOCK - 8, seed=seed), max_tokens=8)
    assert run_all(eagle.vllm, [request("again", ids)]).cached["again"] == 34 * BLOCK
    reset(eagle)


def test_an_adapter_beside_a_drafter_gives_the_same_tokens(eagle: Both, demo_model_path: Path, tmp_path: Path) -> None:
    """The drafter has the model's embeddings, and no adapter; a request of the base runs beside."""
    spec, scope = described(save_adapter(demo_model_path, tmp_path / "one", 1, ("q_proj", "v_proj", "up_proj")), "one")
    for engine in (eagle.vllm, eagle.torch):
        engine.adapters.load(spec)
    ids = eagle.prompt(100, seed=71)
    asked = [request("one", ids, 20, scope=scope), request("base", ids, 20)]
    wanted = run_all(eagle.torch, asked).tokens
    assert wanted["one"] != wanted["base"]
    assert run_all(eagle.vllm, asked).tokens == wanted
    again = run_all(eagle.vllm, asked)
    assert (again.tokens, set(again.cached.values())) == (wanted, {3 * BLOCK})


def test_a_model_whose_own_layer_drafts_finds_as_much(tmp_path: Path) -> None:
    """MTP: its layer's KV is in the model's blocks, sized, predicted and found with them. vLLM makes the weights."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 96, "moe_intermediate_size": 64, "head_dim": 32}
    sizes |= {"vocab_size": 4096, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    }
    model = Glm4MoeConfig(**sizes, **experts, max_position_embeddings=2048, initializer_range=0.3, eos_token_id=2)
    model.architectures = ["Glm4MoeForCausalLM"]
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"none": np.zeros(1)}, tmp_path / "model.safetensors")
    config = AppConfig(
        engine="vllm", block_size=BLOCK, num_blocks=96, dtype="float32", device="cpu", enforce_eager=True, kv_pull=True,
        max_num_seqs=8, speculative_config={"method": "mtp", "num_speculative_tokens": 1},
        engine_args={"load_format": "dummy"},
    )  # fmt: skip
    engine = make_engine(config, load_checkpoint_info(tmp_path), lambda events: None)
    assert isinstance(engine, VllmEngine)
    both = Both(engine, None, Routers(), load_checkpoint_info(tmp_path))  # type: ignore[arg-type]
    engine.start()
    try:
        found = {}
        for length in LENGTHS:
            ids = both.prompt(length, seed=length)
            _, tokens = compute(both, ids)
            again = run_all(both.vllm, [request("again", ids)])
            assert again.tokens["again"] == tokens
            found[length] = again.cached["again"]
        (layout,) = engine._endpoints.directory.glob(f"{LAYOUT_FILE}.*")
        assert msgspec.json.decode(layout.read_bytes())["shape"] == [engine.kv_block_bytes]
        assert drafts(both)[0] > 0
    finally:
        engine.stop()
    assert found == {length: (length - 1) // BLOCK * BLOCK for length in LENGTHS}


def test_a_wrong_field_is_one_sentence(demo_model_path: Path) -> None:
    """vLLM starts nothing for it."""
    drafting = {"method": "ngram", "num_speculative_token": 3}
    with pytest.raises(ValueError, match="did you mean num_speculative_tokens"):
        both_engines(demo_model_path, speculative_config=drafting).__enter__()
