"""The report of `benchmarks gpu` is whole at any time, and what it cannot measure says why."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.common.report import BenchmarkError
from benchmarks.figures import ROWS
from benchmarks.gpu import models, run, systems
from benchmarks.gpu.run import Cut, Report, Run
from benchmarks.gpu.shapes import SHAPES, Shape, make_checkpoint, text_of, windowed, write_weights
from benchmarks.gpu.systems import Card, Target, vllm_flags
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.tokenization.tokenizer import PromptTokenizer

H100 = Card("NVIDIA H100 80GB HBM3", 81559 << 20)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run without servers and clients."""
    monkeypatch.setattr(run, "make_checkpoint", lambda *_: tmp_path)
    stack = SimpleNamespace(callback=lambda *_: None, enter_context=lambda _: None)
    options = SimpleNamespace(shape="tiny", minutes=1.0, rows=["first_token", "kill"], json=tmp_path / "out" / "r.json")
    return Run(options, stack, tmp_path)  # type: ignore[arg-type]


def rows_of(made: Run, tmp_path: Path) -> Any:
    return json.loads((tmp_path / "out" / "r.json").read_text())["results"]


def test_a_row_is_written_when_it_is_known_and_a_failed_one_costs_no_other(made: Run, tmp_path: Path) -> None:
    def fails() -> Any:
        raise BenchmarkError("no server")

    made.row("first_token", fails)
    assert rows_of(made, tmp_path)["first_token"]["not_measured"] == "no server"
    made.row("first_token", lambda: ({"x": 1}, "again"))
    made.row("request", lambda: ({"x": 1}, "nobody asked"))
    made.row("kill", lambda: ({"x": 2}, "Two."))
    rows = rows_of(made, tmp_path)
    assert rows.keys() == {"first_token", "kill"}
    assert (rows["kill"]["figures"], rows["kill"]["said"]) == ({"x": 2}, "Two.")


def test_a_row_that_hangs_is_cut_and_sigterm_is_no_failed_row(made: Run, tmp_path: Path) -> None:
    made.row("first_token", lambda: threading.Event().wait(), most_s=0.05)  # type: ignore[arg-type,return-value]
    assert "it took longer than 0 s" in rows_of(made, tmp_path)["first_token"]["not_measured"]

    def ended() -> Any:
        raise SystemExit(143)

    with pytest.raises(SystemExit) as left:
        made.row("kill", ended)
    assert not isinstance(left.value, Cut)
    assert "kill" not in rows_of(made, tmp_path)


def test_a_report_has_the_keys_that_figures_read(tmp_path: Path) -> None:
    report = Report(tmp_path / "r.json", {"shape": "tiny"}, H100)
    systems_of = {"warmpath": 90.0, "vllm serve": 100.0}
    rates = {name: {"tokens_per_s": {"p50": rate}} for name, rate in systems_of.items()}
    first = {name: {"warm_ms": {"p50": rate}} for name, rate in systems_of.items()}
    report.add("decode", {"1": rates}, "Decode.")
    report.add("first_token", {"32768": first}, "First.")
    document = json.loads((tmp_path / "r.json").read_text())
    assert (document["card"], document["summary"]) == (H100.name, "Decode. First.")
    assert ROWS["gpu"].cell(document["results"]) == "cached TTFT **0.90** (32k tokens), decode **0.90** (worst)"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("made", [SHAPES.__getitem__, windowed])
def test_every_token_of_a_made_vocabulary_is_a_text(made: Callable[[str], Shape], shape: str, tmp_path: Path) -> None:
    """And a prompt has exactly as many tokens as asked for."""
    checkpoint = make_checkpoint(made(shape), tmp_path / "checkpoint")
    size = load_checkpoint_info(checkpoint).vocab_size
    tokenizer = PromptTokenizer(checkpoint)
    assert len(tokenizer.encode(text_of(500, checkpoint, 1), b"\0" * 16).token_ids) == 500
    assert text_of(50, checkpoint, 1) != text_of(50, checkpoint, 2)
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(checkpoint)
    assert all(plain.decode([token]) for token in range(3, size, 997))
    assert plain.decode([size - 1]).strip()


def test_written_weights_are_those_of_the_config(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(SHAPES["tiny"], tmp_path / "checkpoint")
    from transformers import AutoModelForCausalLM

    path = write_weights(checkpoint, tmp_path / "weights")
    model, told = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not told["missing_keys"]
    assert 0.01 < model.model.layers[2].mlp.up_proj.weight.std().item() < 0.03


def test_two_engines_fit_on_the_card_and_have_the_same_sizes() -> None:
    shape = SHAPES["llama-8b"]
    kv = H100.kv_bytes(shape)
    assert 2 * (kv + 16.06e9 + systems.RESERVED_BYTES) < H100.total_bytes
    assert kv // shape.kv_token_bytes > 100_000
    flags = vllm_flags(shape, H100)
    assert flags[flags.index("--kv-cache-memory-bytes") + 1] == str(kv)
    with pytest.raises(BenchmarkError, match="use a smaller --shape"):
        Card("small", 40 << 30).kv_bytes(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_windowed_model_has_windows_beside_full_attention(shape: str, tmp_path: Path) -> None:
    """A prompt is longer than the window, and two engines fit on the card."""
    sizes = windowed(shape)
    config = json.loads((make_checkpoint(sizes, tmp_path / "checkpoint") / "config.json").read_text())
    kinds = Counter(config["layer_types"])
    assert kinds.keys() == {"sliding_attention", "full_attention"}
    assert kinds["sliding_attention"] >= 5 * kinds["full_attention"]
    assert config["sliding_window"] < sizes.prompts[0]
    assert H100.kv_bytes(sizes) > 4 * sizes.kv_token_bytes * sizes.prompts[-1]


def test_blocks_in_use_and_drafts_are_read_of_both_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM tells a part of its pool, whose first block holds nothing."""
    ours = """warmpath_kv_cache_blocks{engine="0",state="used"} 30.0
warmpath_kv_cache_blocks{engine="0",state="cached"} 50.0
warmpath_kv_cache_blocks{engine="0",state="free"} 20.0
warmpath_spec_decode_num_draft_tokens_total{engine="0"} 12.0
warmpath_spec_decode_num_accepted_tokens_total{engine="0"} 3.0
"""
    theirs = """vllm:cache_config_info{block_size="32",num_gpu_blocks="101",num_gpu_blocks_override="None"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="model"} 0.3
vllm:spec_decode_num_draft_tokens_total{engine="0"} 12.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 3.0
"""
    for text in (ours, theirs):
        monkeypatch.setattr(Target, "metrics", lambda _, text=text: text)
        assert models.blocks_in_use(text) == (30, 100)
        assert models.drafted(Target("", {}, "")) == (12, 3)


def test_without_a_gpu_or_vllm_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=r"(?s)^error: .*(make venv-vllm|--shape tiny)"):
        main(["gpu"])
