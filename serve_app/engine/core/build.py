"""How an engine comes about: a checkpoint is loaded, in a thread of its own, into the runner that fits its settings."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import Clock, EventSink
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Runner


def build_engine(
    model_path: str | Path, settings: EngineSettings, event_sink: EventSink, *, clock: Clock = time.monotonic
) -> TorchEngine:
    """Load a local checkpoint and return its engine, not started.

    Raises UnsupportedModel for attention this engine does not compute, OSError when there is no checkpoint.
    """
    return TorchEngine(load_runner(model_path, settings), settings, event_sink, clock=clock)


def load_runner(model_path: str | Path, settings: EngineSettings) -> Runner:
    """Load a local checkpoint. Raises what ``build_engine`` raises."""
    from serve_app.engine.runner.model_runner import ModelRunner

    # Loaded in a thread that ends: OpenMP workers left to the caller's thread would share the cores with the loop's,
    # and libgomp then puts every worker to sleep after each operation (a decode step takes 14 ms instead of 8).
    with ThreadPoolExecutor(max_workers=1) as loader:
        return loader.submit(ModelRunner, model_path, settings).result()
