"""Drafts in the settings: their forms, refusals before anything is loaded, and what vLLM is given; no vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints.checkpoint import CheckpointError
from serve_app.checkpoints.sources import load_served_model, with_local_drafter
from serve_app.cli.checks.finding import Look
from serve_app.cli.checks.run import findings
from serve_app.config.app import AppConfig
from serve_app.config.engine import SPEC_ARGS
from serve_app.config.files import load_settings
from serve_app.engine.vllm.drafts import draft_layers, refused_drafter, with_whole_hits
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.ingress.outside import LoadedModel
from serve_app.replica.engine_factory import drafter_fields, refused_settings, served_fields

EAGLE = {"method": "eagle", "model": "org/head", "num_speculative_tokens": 2}


def config_of(drafting: Any = None, **settings: Any) -> AppConfig:
    return AppConfig.model_validate({"engine": "vllm", "block_size": 32, "speculative_config": drafting, **settings})


@pytest.mark.parametrize(
    ("settings", "drafting", "ahead"),
    [
        ({}, {}, 0),
        ({"speculative_model": "ngram"}, {"method": "ngram", "num_speculative_tokens": 4}, 0),
        ({"speculative_config": EAGLE}, EAGLE, 2),
        ({"speculative_config": {"num-speculative-tokens": 2, "method": "eagle", "model": "org/head"}}, EAGLE, 2),
        ({"engine_args": {"spec_method": "eagle", "spec_model": "org/head", "spec_tokens": 2}}, EAGLE, 2),
        ({"speculative_config": EAGLE | {"method": "draft_model"}}, EAGLE | {"method": "draft_model"}, 0),
        ({"speculative_config": {"model": "[ngram]"}}, {"method": "ngram", "num_speculative_tokens": 4}, 0),
        (
            {"speculative_config": {"method": "eagle3", "model": "x"}, "num_speculative_tokens": 3},
            {"method": "eagle3", "model": "x", "num_speculative_tokens": 3},
            3,
        ),
        ({"speculative_config": {"method": "mtp"}}, {"method": "mtp"}, 16),
        ({"speculative_config": {"model": "x", "num_speculative_tokens": 1}}, {"model": "x"}, 1),
    ],
)
def test_drafts_are_named_in_any_of_vllms_ways(settings: dict[str, Any], drafting: dict[str, Any], ahead: int) -> None:
    """They are the same in every process; without a number of vLLM's, `num_speculative_tokens` counts."""
    config = AppConfig.model_validate({"engine": "vllm", "block_size": 32, **settings})
    assert config.drafting == {**config.drafting, **drafting}
    assert config.draft_lookahead_tokens == ahead
    assert refused_settings(config, on_cpu=True) == []
    assert AppConfig.model_validate(config.to_json()).drafting == config.drafting


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"engine": "torch", "speculative_config": EAGLE}, "only engine: vllm drafts"),
        ({"speculative_model": "ngram", "speculative_config": EAGLE}, "speculative_model and speculative_config both"),
        (
            {"speculative_config": EAGLE, "engine_args": {"spec_tokens": 3}},
            "speculative_config and engine_args.spec_tokens both say how to draft",
        ),
        ({"speculative_model": "small"}, "name other drafters in speculative_config"),
    ],
)
def test_two_ways_at_once_are_an_error(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        AppConfig.model_validate({"engine": "vllm", **settings})


@pytest.mark.parametrize(
    ("drafting", "told"),
    [
        ({"method": "custom_class", "model": "x.Y"}, "method: a class of yours would see the tokens of all tenants"),
        ({"model": "package.module.Drafter"}, "method: a class of yours"),
        ({"method": "extract_hidden_states"}, "method: it drafts nothing"),
        (
            {"method": "suffix", "suffix_decoding_max_cached_requests": 100},
            "suffix_decoding_max_cached_requests: drafts would come from other tenants' answers",
        ),
        (EAGLE | {"rejection_sample_method": "synthetic"}, "rejection_sample_method: answers would hold tokens"),
        (EAGLE | {"disable_eagle_block_drop": False}, "disable_eagle_block_drop: every hit would lose"),
        (EAGLE | {"target_model_config": {}}, "target_model_config: vLLM derives it"),
    ],
)
def test_drafts_that_would_break_a_promise_are_refused_by_their_field(drafting: dict[str, Any], told: str) -> None:
    (sentence,) = refused_settings(config_of(drafting), on_cpu=True)
    assert sentence.startswith(f"speculative_config.{told}")


def test_an_argument_of_vllm_is_named_as_the_setting() -> None:
    (sentence,) = refused_settings(config_of(engine_args={"speculative_config": EAGLE}), on_cpu=True)
    assert "use speculative_config: in the settings" in sentence


MODEL = {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("drafting", "drafter", "told"),
    [
        (EAGLE, {"vocab_size": 4096, "hidden_size": 256}, ""),
        (EAGLE, {"vocab_size": 8192, "hidden_size": 256}, "a vocabulary of 8192 tokens and the model one of 4096"),
        (EAGLE, {"vocab_size": 4096, "hidden_size": 512}, "reads states of 512 numbers and the model's have 256"),
        ({"method": "eagle3"}, {"vocab_size": 4096, "draft_vocab_size": 512, "hidden_size": 256}, ""),
        ({"method": "eagle3"}, {"vocab_size": 4096, "hidden_size": 512, "target_hidden_size": 256}, ""),
        ({"method": "eagle3"}, {"transformer_layer_config": {"vocab_size": 512}}, "vocabulary of 512"),
        ({"method": "draft_model"}, {"vocab_size": 4096, "hidden_size": 64}, ""),
        ({"method": "draft_model"}, {"text_config": {"vocab_size": 5000}}, "vocabulary of 5000"),
        ({"method": "draft_model", "use_heterogeneous_vocab": True}, {"vocab_size": 5000}, ""),
        ({}, {"vocab_size": 5000}, "vocabulary of 5000"),
        ({"method": "medusa"}, {"hidden_size": 256}, ""),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_drafter_of_another_model_is_refused(
    drafting: dict[str, Any], drafter: dict[str, Any], told: str, nested: bool
) -> None:
    found = refused_drafter(drafting, {"text_config": MODEL} if nested else MODEL, drafter)
    assert found == [] if not told else len(found) == 1 and told in found[0]


def test_a_wrong_drafter_is_a_sentence_before_the_start(demo_model_path: Path, tmp_path: Path) -> None:
    """So is one that is missing; paths in a file are relative to it."""
    head, settings = tmp_path / "head", tmp_path / "settings.yaml"
    head.mkdir()
    (head / "config.json").write_text(json.dumps({"vocab_size": 7, "hidden_size": 256}))
    for name in ("./head", "./other"):
        given = {"engine": "vllm", "model": str(demo_model_path), "block_size": 32}
        settings.write_text(json.dumps(given | {"speculative_config": EAGLE | {"model": name}}))
        config = load_settings(settings, [])
        told = [each.sentence for each in findings(Look("start", config), "model") if each.state == "problem"]
        assert len(told) == 1
        assert ("vocabulary of 7 tokens" if name == "./head" else "there is no model") in told[0]
        with pytest.raises(CheckpointError, match=r"speculative_config\.model: "):
            drafter_fields(config, served_fields(config, demo_model_path))


def test_the_drafter_of_every_replica_is_the_one_of_the_start(tmp_path: Path) -> None:
    """Its path is absolute, and the settings say it once."""
    (tmp_path / "config.json").write_text("{}")
    given = {"spec_model": str(tmp_path), "spec_method": "eagle3", "seed": 1}
    local = with_local_drafter(config_of(engine_args=given))
    assert local.drafting["model"] == str(tmp_path.resolve())
    assert not local.engine_args.keys() & SPEC_ARGS.keys()
    assert local.engine_args == {"seed": 1}
    assert AppConfig.model_validate(local.model_dump(mode="json", exclude_unset=True)).drafting == local.drafting


def test_hits_keep_their_last_block_and_drafts_their_own_request() -> None:
    """vLLM drops the block for drafters that read the next token, unless told otherwise."""
    assert with_whole_hits(EAGLE)["disable_eagle_block_drop"]
    assert with_whole_hits({"method": "mtp"})["disable_eagle_block_drop"]
    assert with_whole_hits({"model": "org/unknown"})["disable_eagle_block_drop"]
    assert with_whole_hits({"method": "ngram"}) == {"method": "ngram"}
    assert with_whole_hits({"method": "suffix"})["suffix_decoding_max_cached_requests"] == 0
    assert with_whole_hits({}) == {}


def test_public_blocks_end_before_a_token_that_changes_a_drafters_kv(demo_model_path: Path) -> None:
    """Else a tenant's first own token would be in KV that others read."""
    config = config_of(public_prompts=[{"name": "p", "version": "1", "text": "word " * 64}])  # 65 tokens
    for drafting, blocks in ((None, 2), (EAGLE | {"num_speculative_tokens": 1}, 2), (EAGLE, 1)):
        own = config.model_copy(update={"model": str(demo_model_path), "speculative_config": drafting})
        tokenizer = LoadedModel.load(own, load_served_model(own), FairWorkers(Shares({}))).tokenizer
        ids = tokenizer.encode("word " * 64, b"r" * 16).token_ids
        assert len(ids) == 65
        assert tokenizer.encode_ids([*ids.tolist(), 7, 7], b"r" * 16, b"p" * 16).public_blocks == blocks


def test_a_drafters_layers_count_in_a_block() -> None:
    own = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 128}
    assert draft_layers(EAGLE, MODEL, own) == own
    assert draft_layers({"method": "eagle3"}, MODEL, {"transformer_layer_config": own}) == own
    assert draft_layers({"method": "mtp"}, MODEL | {"num_nextn_predict_layers": 2}, {})["num_hidden_layers"] == 2
    for none in ({}, {"method": "ngram"}, {"method": "medusa"}):
        assert draft_layers(none, MODEL, own) == {}
