"""Reading a checkpoint's facts, and the errors for a directory without a checkpoint."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from serve_app.checkpoints.checkpoint import CheckpointError, load_checkpoint_info


@pytest.fixture
def copy(demo_model_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model_path, tmp_path / "model"))


def test_the_demo_model_describes_itself(demo_model_path: Path) -> None:
    """Every field comes from the files; both end tokens are eos, the generation config's first."""
    info = load_checkpoint_info(demo_model_path)
    added = json.loads((demo_model_path / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    assert (info.vocab_size, info.max_model_len) == (4096, 32768)
    assert info.eos_token_ids == (ids["<|im_end|>"], ids["<|endoftext|>"])
    assert len(info.fingerprint) == 32


def test_the_fingerprint_is_of_config_and_weights_wherever_they_lie(demo_model_path: Path, copy: Path) -> None:
    """Replicas on different machines share keys; a fine-tune of equal size, or other rope settings, do not."""
    original = load_checkpoint_info(copy).fingerprint
    assert original == load_checkpoint_info(demo_model_path).fingerprint
    size = (copy / "model.safetensors").stat().st_size
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] += np.float32(0.01)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert (copy / "model.safetensors").stat().st_size == size
    tuned = load_checkpoint_info(copy).fingerprint
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 1e4}))
    assert len({original, tuned, load_checkpoint_info(copy).fingerprint}) == 3


def test_eos_falls_back_to_the_tokenizer_and_the_config(copy: Path) -> None:
    """Without a generation config the tokenizer's and the config's eos count, once each."""
    (copy / "generation_config.json").unlink()
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": [7, config["eos_token_id"]]}))
    assert load_checkpoint_info(copy).eos_token_ids == (config["eos_token_id"], 7)


@pytest.mark.parametrize(
    ("name", "becomes", "sentence"),
    [
        ("", None, "no directory"),
        ("config.json", None, "config.json does not exist"),
        ("config.json", "{", "not valid JSON"),
        ("config.json", "{}", "must name architectures"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "[]", "not a tokenizer"),
        ("model.safetensors", None, "convert the checkpoint to safetensors"),
        ("model.safetensors", "short", "not a whole safetensors file"),
        ("model.safetensors", "cut", "cut short"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "model-2.safetensors"}}', "model-2.safetensors"),
    ],
)
def test_a_broken_checkpoint_is_named_with_a_remedy(copy: Path, name: str, becomes: str | None, sentence: str) -> None:
    """Each fault has its own sentence. ``becomes``: the file's new content; None: the file is removed."""
    file, whole = copy / name, (copy / "model.safetensors").read_bytes()
    if becomes is None:
        shutil.rmtree(copy) if not name else file.unlink()
    else:
        file.write_bytes(whole[:-4] if becomes == "cut" else becomes.encode())
    with pytest.raises(CheckpointError, match=sentence):
        load_checkpoint_info(copy)
