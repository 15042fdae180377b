"""A compiled model answers as the plain one does, whatever the shape of a step, and is compiled once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from serve_app.config.app import AppConfig
from serve_app.engine.core.build import build_engine
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.cpu import compiled_forward
from serve_app.engine.cpu.compiled_forward import NotCompiled
from serve_app.engine.runner import model_runner
from serve_app.engine.settings import EngineSettings
from tests.serve_app.conftest import Reference
from tests.serve_app.engine.adapters import described, peft_greedy, save_adapter
from tests.serve_app.engine.tiny import prompt, request, run_all

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiling a model needs g++")


def settings(dtype: str) -> EngineSettings:
    return EngineSettings(
        block_size=4, num_blocks=400, max_model_len=512, max_num_batched_tokens=96, max_num_seqs=8, dtype=dtype,
        device="cpu", num_threads=1, compile_model=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(checkpoints: dict[str, Path]) -> Iterator[TorchEngine]:
    engine = build_engine(checkpoints["qwen3"], settings("float32"), lambda _: None)
    engine.start()
    yield engine
    engine.stop()


def test_greedy_output_is_transformers_own_at_every_shape(engine: TorchEngine, reference: Reference) -> None:
    """One sequence and many, chunks, prefix hits at every block boundary, in float32; nothing is compiled again."""
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    base = prompt(150, seed=3)
    batches = [[base[:2]], [base[:1]], [base], [base[: 4 * n + 1] for n in range(1, 9)], [prompt(97, 1), prompt(3, 2)]]
    for number, batch in enumerate(batches):
        found = run_all(engine, [request(f"{number}-{i}", ids, 6) for i, ids in enumerate(batch)])
        for i, ids in enumerate(batch):
            assert found.tokens[f"{number}-{i}"] == reference("qwen3", ids, 6)
    assert found.cached["4-0"] == 0
    assert run_all(engine, [request("again", base, 6)]).cached["again"] == 148
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_sequences_with_adapters_run_plainly_beside_others(
    engine: TorchEngine, checkpoints: dict[str, Path], tmp_path: Path, reference: Reference
) -> None:
    """An adapter's hooks are no part of what was compiled: such steps are PEFT's, those after them the base's."""
    adapter = save_adapter(checkpoints["qwen3"], tmp_path / "a", 5)
    spec, scope = described(adapter)
    engine.load_adapter(spec)
    ids = prompt(30, seed=9)
    found = run_all(engine, [request("lora", ids, 6, scope=scope), request("base", ids, 12)])
    assert found.tokens["lora"] == peft_greedy(checkpoints["qwen3"], adapter, ids, 6)
    assert found.tokens["base"] == reference("qwen3", ids, 12)


def test_packed_products_are_called_back(checkpoints: dict[str, Path]) -> None:
    """In bfloat16 the linear layers are packed: the compiled forward's logits are those of the plain one."""
    runner = model_runner.ModelRunner(checkpoints["llama"], settings("bfloat16"))
    assert runner._compiled is not None
    with torch.inference_mode():
        step, used = compiled_forward._small_step(runner.pool, runner.attention.backend)
        one, other = runner._compiled(step), runner.forward(step)
    assert float((one - other).norm() / other.norm()) < 0.05
    assert used < runner.pool.num_blocks
    assert {"warmpath_model_compiled": 1.0}.items() <= {name: value for name, _, value in runner.samples(())}.items()


def test_a_machine_without_a_compiler_is_told(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What went wrong inside is named, and what to leave out."""

    def fails(*_: object, **__: object) -> object:
        raise RuntimeError("no g++ here")

    monkeypatch.setattr(compiled_forward.CompiledForward, "__call__", fails)
    with pytest.raises(NotCompiled, match=r"needs a C\+\+ compiler.*no g\+\+ here"):
        build_engine(checkpoints["qwen3"], settings("float32"), lambda _: None)


def test_a_compiled_model_that_is_wrong_is_refused(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        compiled_forward.CompiledForward,
        "__call__",
        lambda _, __, rows: torch.from_numpy(np.ones((len(rows), 211), dtype=np.float32)),
    )
    with pytest.raises(NotCompiled, match="off by"):
        build_engine(checkpoints["qwen3"], settings("float32"), lambda _: None)


def test_it_is_not_combined_with_a_drafter(checkpoints: dict[str, Path]) -> None:
    drafting = replace(settings("float32"), speculative_model=str(checkpoints["qwen3"]), num_speculative_tokens=2)
    with pytest.raises(ValueError, match="compile_model and speculative_model"):
        build_engine(checkpoints["qwen3"], drafting, lambda _: None)
    with pytest.raises(ValueError, match="compile_model and speculative_model"):
        AppConfig(compile_model=True, speculative_model="demo")
