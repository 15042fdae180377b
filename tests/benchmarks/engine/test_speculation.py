"""The speculation benchmark's pairs are what it says of them, and its figures come from real runs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.draft_pairs import LOWER_LAYERS, build_pairs
from benchmarks.engine.eagle_training import WINDOW, agreeing_pair, unrolled_loss, write_first_layer
from benchmarks.engine.speculation import Workload, compare, run
from serve_app.engine.speculative.eagle_config import read_eagle_config
from serve_app.engine.speculative.eagle_head import load_head


def test_pairs_share_a_vocabulary_and_an_agreeing_one_reaches_the_bar(demo_model_path: Path, tmp_path: Path) -> None:
    pairs = build_pairs(demo_model_path, tmp_path)
    assert pairs["same"] == (demo_model_path, demo_model_path)
    for model, drafter in (pairs["agreeing"], pairs["lower_layers"]):
        configs = [json.loads((path / "config.json").read_text()) for path in (model, drafter)]
        assert [config["num_hidden_layers"] for config in configs] == [4, LOWER_LAYERS]
        assert configs[0]["vocab_size"] == configs[1]["vocab_size"]
    # The model drafting for itself: the prompt's step gives a token, then 24 come in five steps.
    figures = compare(*pairs["same"], Workload(2, 30, 25), 4, threads=1)
    assert figures["outputs_equal"]
    assert figures["base_steps_per_token"] <= 0.35
    assert figures["acceptance_rate"] > 0.75
    assert figures["speed_up"] > 0
    never = compare(*pairs["lower_layers"], Workload(1, 30, 12), 4, threads=1)
    assert never["outputs_equal"]
    assert never["base_steps_per_token"] > 0.8


def test_a_head_made_to_agree_reaches_the_bar_and_distillation_learns(demo_model_path: Path, tmp_path: Path) -> None:
    base, head = agreeing_pair(demo_model_path, tmp_path)
    workload = Workload(2, 40, 30)
    plain, drafted = (run(base, which, workload, 4, dtype="float32", threads=1) for which in (None, head))
    assert drafted.tokens == plain.tokens
    assert drafted.base_steps_per_token <= 0.35
    write_first_layer(base, tmp_path / "learner", heeds_states=True)
    config = read_eagle_config(tmp_path / "learner")
    assert config is not None
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    learner = load_head(config, model, torch.float32, torch.device("cpu"))
    ids = torch.randint(model.config.vocab_size, (2, WINDOW), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW([learner.fc.weight, *learner.midlayer.parameters()], lr=1e-3)
    losses = []
    for _ in range(6):
        loss, _ = unrolled_loss(learner, model, ids, config)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
