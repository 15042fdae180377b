"""Models and engines for the engine's tests; the demo model's tokenizer and its grammar compiler."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from router.protocol.events import Event
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.runner.model_runner import load_runner
from serve_app.engine.settings import EngineSettings
from serve_app.structured.compiler import GrammarCompiler
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.gpu.device import gpu
from tests.serve_app.engine.tiny import save_tiny

MakeEngine = Callable[..., TorchEngine]
Reference = Callable[[str, Any, int], list[int]]


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    """Workers of the suite share the cores, so each has one thread; kernels are tested with all threads."""
    kernels = {"attention", "cpu"} & set(request.path.parts)
    torch.set_num_threads((os.cpu_count() or 1) if kernels else 1)


@pytest.fixture(scope="session")
def tokenizer(demo_model_path: Path) -> PromptTokenizer:
    return PromptTokenizer(demo_model_path)


@pytest.fixture(scope="session")
def compiler(demo_model_path: Path) -> GrammarCompiler:
    info = load_checkpoint_info(demo_model_path)
    return GrammarCompiler(info.path, info.vocab_size, info.eos_token_ids)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each kind of device that a test covers; skipped if the machine has none."""
    return gpu() if request.param == "cuda" else torch.device(request.param)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_tiny(kind, tmp_path_factory.mktemp(kind)) for kind in ("qwen3", "llama")}


@pytest.fixture(scope="session")
def reference(checkpoints: dict[str, Path]) -> Reference:
    """Greedy tokens of plain transformers generation."""
    models = {kind: AutoModelForCausalLM.from_pretrained(path) for kind, path in checkpoints.items()}

    def generate(kind: str, ids: Any, max_tokens: int) -> list[int]:
        row = torch.tensor(ids, dtype=torch.long)[None]
        mask = torch.ones_like(row)
        found = models[kind].generate(
            row, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        tokens: list[int] = found[0, row.shape[1] :].tolist()
        return tokens

    return generate


@pytest.fixture
def engines() -> Iterator[list[TorchEngine]]:
    """The engines of a test, which are stopped afterwards."""
    made: list[TorchEngine] = []
    yield made
    for engine in made:
        engine.stop()


@pytest.fixture
def make_engine(checkpoints: dict[str, Path], engines: list[TorchEngine]) -> MakeEngine:
    """Build an engine over a tiny model. ``events``: a list that collects cache events."""

    def make(
        kind: str = "qwen3", *, events: list[Event] | None = None, start: bool = True, **overrides: Any
    ) -> TorchEngine:
        values = {"dtype": "float32", "num_blocks": 256, "max_num_seqs": 16, "max_num_batched_tokens": 256, **overrides}
        sink = events.extend if events is not None else lambda _: None
        settings = EngineSettings(**values)
        engine = TorchEngine(load_runner(checkpoints[kind], settings), settings, sink)
        engines.append(engine)
        if start:
            engine.start()
        return engine

    return make
