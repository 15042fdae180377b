"""Which checkpoints may draft for which, what that does to cache keys, and how a request says no."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from transformers import AutoConfig

from serve_app.api.openai.request import parse_chat, parse_completion
from serve_app.checkpoints.checkpoint import CheckpointError, load_checkpoint_info
from serve_app.checkpoints.drafter import with_drafter
from serve_app.config.app import AppConfig
from serve_app.engine.runner.kv_size import kv_bytes_per_block
from serve_app.engine.speculative.eagle_config import read_eagle_config
from serve_app.engine.speculative.eagle_head import EagleHead
from serve_app.engine.speculative.runner import SpeculativeRunner
from serve_app.errors import InvalidRequest
from serve_app.replica.engine_factory import make_engine


def settings(model: Path, drafter: Path | None, **others: object) -> AppConfig:
    values = {"model": str(model), "speculative_model": drafter and str(drafter), **others}
    return AppConfig.model_validate(values)


@pytest.fixture
def copy(demo_model_path: Path, tmp_path: Path) -> Path:
    return shutil.copytree(demo_model_path, tmp_path / "draft")


def test_the_pair_has_a_fingerprint_of_its_own(demo_model_path: Path, copy: Path) -> None:
    """None, one and another drafter give three keys, the same pair one from any path. (docs/speculation.md)"""
    info = load_checkpoint_info(demo_model_path)
    assert with_drafter(info, settings(demo_model_path, None)) == info
    ngram = settings(demo_model_path, None, engine="vllm").model_copy(update={"speculative_model": "ngram"})
    assert with_drafter(info, ngram) == info, "KV does not depend on drafts"
    pair = with_drafter(info, settings(demo_model_path, copy))
    again = with_drafter(info, settings(demo_model_path, demo_model_path))
    assert pair.fingerprint == again.fingerprint != info.fingerprint
    assert len(pair.fingerprint) == len(info.fingerprint)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    middle = len(weights) - 100
    weights[middle - 4_000_000 :] = bytes(len(weights) - middle + 4_000_000)
    (copy / "model.safetensors").write_bytes(weights)
    assert with_drafter(info, settings(demo_model_path, copy)).fingerprint not in (pair.fingerprint, info.fingerprint)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"vocab_size": 4095}, r"has 4095 tokens.*has 4096"),
        ({"max_position_embeddings": 2048}, "set max_model_len to at most 2048"),
        ({"tokens": "swapped"}, "the token '!' has id"),
        ({"nowhere": True}, "neither a built-in model"),
        ({"engine": "simulated"}, "needs engine=torch"),
    ],
    ids=str,
)
def test_who_cannot_draft_is_refused(demo_model_path: Path, copy: Path, change: dict[str, Any], sentence: str) -> None:
    """Another vocabulary, by size and by content, too few positions, nothing there, nothing to draft with."""
    info = load_checkpoint_info(demo_model_path)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    assert with_drafter(info, settings(demo_model_path, copy)), "written otherwise it is the same vocabulary"
    vocabulary = tokenizer["model"]["vocab"]
    if "tokens" in change:
        vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    drafter = copy / "nowhere" if "nowhere" in change else copy
    with pytest.raises(CheckpointError, match=sentence):
        with_drafter(info, settings(demo_model_path, drafter, engine=change.get("engine", "torch")))
    if "max_position_embeddings" in change:
        assert with_drafter(info, settings(demo_model_path, copy, max_model_len=2048))


def test_both_pools_fit_the_budget(demo_model_path: Path) -> None:
    """kv_cache_bytes bounds the model's and the drafter's KV together, and the engine speculates."""
    info = load_checkpoint_info(demo_model_path)
    per_block = kv_bytes_per_block(AutoConfig.from_pretrained(demo_model_path), "float32", 16)
    config = settings(
        demo_model_path, demo_model_path, dtype="float32", kv_cache_bytes=21 * per_block, num_speculative_tokens=3
    )
    engine = make_engine(config, info, lambda _: None)
    assert engine.settings.num_blocks == 10
    assert engine.settings.num_speculative_tokens == 3
    assert isinstance(engine._runner, SpeculativeRunner)
    plain = make_engine(config.model_copy(update={"speculative_model": None}), info, lambda _: None)
    assert (plain.settings.num_blocks, plain.settings.num_speculative_tokens) == (21, 0)


def test_an_eagle_head_is_a_drafter_of_its_own_format(demo_model_path: Path, tmp_path: Path) -> None:
    """It needs no tokenizer and no positions; its bytes are in the budget; one of another model is refused."""
    head = tmp_path / "head"
    head.mkdir()
    values = json.loads((demo_model_path / "config.json").read_text())
    values |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "max_position_embeddings": 64}
    values |= {"num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    (head / "config.json").write_text(json.dumps(values))
    found = read_eagle_config(head)
    assert found is not None
    made = EagleHead(found)
    save_file({name: tensor.contiguous() for name, tensor in made.state_dict().items()}, head / "model.safetensors")
    info = load_checkpoint_info(demo_model_path)
    pair = with_drafter(info, settings(demo_model_path, head))
    assert pair.fingerprint not in (info.fingerprint, with_drafter(info, settings(demo_model_path, None)).fingerprint)
    per_block = kv_bytes_per_block(AutoConfig.from_pretrained(demo_model_path), "float32", 16)
    per_block += 4 * (2 * 16 * 2 * 64 + 256)
    config = settings(demo_model_path, head, dtype="float32", kv_cache_bytes=20 * per_block)
    engine = make_engine(config, pair, lambda _: None)
    assert engine.settings.num_blocks == 20
    assert isinstance(engine._runner, SpeculativeRunner)
    assert engine._runner.block_bytes == per_block
    (head / "config.json").write_text(json.dumps({**values, "hidden_size": 512}))
    with pytest.raises(CheckpointError, match=r"hidden_size 512, and .* has 256"):
        with_drafter(info, settings(demo_model_path, head))


def test_disable_spec_decode_is_read_from_the_body() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "disable_spec_decode": %s}'
    for off in (False, True):
        raw = body % json.dumps(off).encode()
        assert parse_chat(raw).disable_spec_decode == parse_completion(raw).disable_spec_decode == off
    with pytest.raises(InvalidRequest, match="disable_spec_decode must be true or false"):
        parse_chat(body % b'"yes"')
