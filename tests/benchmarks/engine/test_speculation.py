"""The speculation benchmark's pairs are what it says of them, and its figures come from real runs."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.engine.draft_pairs import LOWER_LAYERS, build_pairs, eagle_pair
from benchmarks.engine.speculation import Workload, compare, run


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


def test_a_head_made_to_agree_reaches_the_bar(demo_model_path: Path, tmp_path: Path) -> None:
    base, head = eagle_pair(demo_model_path, tmp_path)
    workload = Workload(2, 40, 30)
    plain, drafted = (run(base, drafter, workload, 4, dtype="float32", threads=1) for drafter in (None, head))
    assert drafted.tokens == plain.tokens
    assert drafted.base_steps_per_token <= 0.35
