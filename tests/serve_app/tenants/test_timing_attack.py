"""A tenant that guesses another one's prompts learns nothing from the time to the first token.

Here the time is its cause: the number of prompt tokens computed by a real engine under the real keys, for prompts of
equal length (docs: isolation).
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.output_collector import OutputCollector
from benchmarks.common.prompts import WORDS, text_of
from serve_app.api.request import ChatRequest
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.prompts import PublicPromptConfig
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.runner.model_runner import load_runner
from serve_app.engine.settings import EngineSettings
from serve_app.generation.prepare import Limits, Preparer
from serve_app.prompts.registry import Prompts
from serve_app.tenants import Tenant, Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer

SECRET = b"a benchmark's secret, 32 bytes.."
GUESSES = range(20)


class Stage:
    """A tokenizer, the keys of tenants, and one engine; ``system`` is the public prompt of all of them."""

    def __init__(self, model: Path, *, public: bool) -> None:
        self._system = text_of(40, model, 0)
        self._public = public
        tokenizer = PromptTokenizer(model, cache_bytes=64 << 20, block_size=16)
        self._words = [f" {word}" for word in WORDS if len(tokenizer.encode(f" {word}", b"\0" * 16).token_ids) == 1]
        prompts = Prompts([PublicPromptConfig(name="rules", version="1", text=self._system)] if public else [])
        prompts.install(tokenizer)
        self._preparer = Preparer(
            load_checkpoint_info(model), tokenizer, Tenants([], SECRET), SECRET,
            AdapterRegistry("demo"), Limits(8192, 1), prompts,
        )  # fmt: skip
        settings = EngineSettings(num_blocks=1024, max_model_len=8192, num_threads=1, dtype="float32")
        self.engine = TorchEngine(load_runner(model, settings), settings, lambda _: None)
        self.engine.start()
        self._number = 0

    def text(self, number: int) -> str:
        """Return the prompt of this number, as secret as any; all have the same number of tokens."""
        return "".join(random.Random(number).choices(self._words, k=24))  # a workload, not a secret

    def ask(self, tenant: Tenant, text: str) -> int:
        """Send one chat, wait for its first token, and return the number of cached tokens."""
        messages = [{"role": "user", "content": text}]
        if self._public:
            messages.insert(0, {"role": "system", "content": self._system})
        wanted = ChatRequest(model="demo", messages=tuple(messages), max_tokens=1, temperature=0.0)
        self._number += 1
        (asked,) = asyncio.run(self._preparer.prepare(wanted, tenant, f"r{self._number}"))
        collector = OutputCollector()
        collector.answer_all(self.engine, [asked])
        return collector.cached_tokens[asked.request_id]


@pytest.fixture(params=[False, True], ids=["private", "public prompt"])
def stage(request: pytest.FixtureRequest, tiny_model_path: Path) -> Iterator[Stage]:
    made = Stage(tiny_model_path, public=request.param)
    yield made
    made.engine.stop()


@pytest.mark.parametrize("group", [None, "friends"])
def test_a_guess_reveals_nothing_of_another_tenants_prompts(stage: Stage, group: str | None) -> None:
    """Right or wrong guesses hit only public blocks; within one trust group the same attack succeeds."""
    attacker, victim = (Tenant(name, group) for name in ("attacker", "victim"))
    stage.ask(attacker, stage.text(5000))
    right, wrong = [], []
    for number in GUESSES:
        stage.ask(victim, stage.text(number))
        right.append(stage.ask(attacker, stage.text(number)))
        wrong.append(stage.ask(attacker, stage.text(1000 + number)))
    # Public blocks are always shared: of 40 tokens and the marks around them, two or three whole blocks.
    (public,) = set(wrong)
    assert public in ((32, 48) if stage._public else (0,))
    if group is None:
        assert set(right) == {public}
    else:
        assert min(right) > public
