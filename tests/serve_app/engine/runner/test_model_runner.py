"""Rules of the model runner: sizes, copies of blocks, and failures of single sequences."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from serve_app.engine.attention.supported import UnsupportedModel
from serve_app.engine.runner.kv_copy import copy_in, copy_out, gather_blocks, scatter_blocks
from serve_app.engine.runner.kv_size import blocks_in_budget, kv_bytes_per_block
from serve_app.engine.runner.model_runner import ModelRunner
from serve_app.engine.settings import EngineSettings
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.tiny import prompt, request, run_all

_GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_head": 4, "n_embd": 64}


def test_kv_bytes_are_the_pools(checkpoints: dict[str, Path]) -> None:
    """The formula gives exactly the tensor's bytes, and 1.22 GiB for 10,000 tokens of an 8B Llama in bfloat16."""
    runner = ModelRunner(checkpoints["qwen3"], EngineSettings(num_blocks=7, dtype="float32"))
    assert runner.block_bytes * 7 == runner.pool.tensor.numel() * runner.pool.tensor.element_size()
    llama = LlamaConfig(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    per_block = kv_bytes_per_block(llama, "bfloat16", 16)
    assert per_block * 625 == 1_310_720_000
    assert blocks_in_budget(per_block, 10 * per_block + 1) == 10
    with pytest.raises(ValueError, match="cannot hold one"):
        blocks_in_budget(per_block, per_block - 1)
    assert kv_bytes_per_block(Qwen3Config(head_dim=128, hidden_size=64), "float32", 16) % 128 == 0
    kinds = ["linear_attention", "conv", "full_attention", "sliding_attention"]
    some = SimpleNamespace(**llama.to_dict(), layer_types=kinds)
    assert kv_bytes_per_block(some, "bfloat16", 16) * llama.num_hidden_layers == 2 * per_block


def test_weights_of_another_model_than_the_configs_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Otherwise missing weights would be drawn at random, and the answers nonsense."""
    shutil.copytree(checkpoints["qwen3"], tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    for changed in ({"num_hidden_layers": fields["num_hidden_layers"] + 1, "layer_types": None}, _GPT2):
        (tmp_path / "config.json").write_text(json.dumps(fields | changed))
        with pytest.raises(UnsupportedModel, match=r"the weights lack \d+ of its tensors"):
            ModelRunner(tmp_path, EngineSettings(num_blocks=4))


def test_logits_that_are_no_numbers_fail_their_sequence_alone(make_engine: MakeEngine, reference: Reference) -> None:
    """A token with a broken embedding ruins only its own request, not its neighbours or the next user of its blocks."""
    engine = make_engine(num_blocks=12, max_num_seqs=3)
    poison = 200
    engine._runner.model.get_input_embeddings().weight.data[poison] = float("nan")  # type: ignore[attr-defined]
    clean = {f"r{i}": prompt(30, i) % poison for i in range(3)}
    broken = np.append(prompt(29) % poison, poison)
    got = run_all(engine, [request("bad", broken, 5), *[request(name, ids, 20) for name, ids in clean.items()]])
    assert got.finish["bad"] == "error"
    assert "not numbers" in got.errors["bad"]
    for name, ids in clean.items():
        expected = reference("qwen3", ids, 20)
        if poison in expected:  # from there on the broken embedding is its own
            expected = expected[: expected.index(poison) + 1]
        assert got.tokens[name][: len(expected)] == expected, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gathered_copy_is_the_copy_block_by_block(device: torch.device, dtype: torch.dtype) -> None:
    here = torch.randn(3, 2, 9, 4, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    there = here.clone().to(device)
    blocks = [7, 0, 4]
    rows = [np.empty(here[:, :, 0].nbytes, dtype=np.uint8) for _ in blocks]
    copy_out(here, blocks, rows)
    assert np.array_equal(gather_blocks(there, blocks), np.stack(rows))
    copy_in(here, [1, 2, 8], rows)
    scatter_blocks(there, [1, 2, 8], rows)
    assert torch.equal(there.cpu(), here)
