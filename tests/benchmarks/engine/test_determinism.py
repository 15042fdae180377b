"""The determinism benchmark's cases are what they say, and in float32 none of them changes an answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine import determinism
from benchmarks.engine.determinism import CASES, Case, differing
from serve_app.engine.core.build import load_runner
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.settings import EngineSettings

PROMPT_TOKENS = 60


class Watched(Case):
    """Remembers its engines."""

    def _engine(self, step_tokens: int) -> TorchEngine:
        self.last = super()._engine(step_tokens)
        return self.last

    def counted(self, name: str) -> float:
        """What the last engine counted."""
        return sum(value for sample, _, value in self.last.stats().samples if sample == name)


def test_cases_differ_in_how_and_not_in_what(demo_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is served from the cache, one over blocks that eviction freed here and there; none is answered otherwise."""
    monkeypatch.setattr(determinism, "NUM_BLOCKS", 32)
    settings = EngineSettings(num_blocks=32, dtype="float32", num_threads=1)
    prompts = [np.random.default_rng(i).integers(300, 4000, PROMPT_TOKENS, dtype=np.int32) for i in range(3)]
    case = Watched(load_runner(demo_model_path, settings), settings, prompts, 4)
    case.cached(0)
    assert case.counted("warmpath_prefix_cache_hits_total") == PROMPT_TOKENS // 16 * 16
    case.scattered_blocks(0)
    assert case.counted("warmpath_prefix_cache_evicted_blocks_total") > 0
    assert differing(case, "float32", len(prompts)) == dict.fromkeys(CASES, 0)
