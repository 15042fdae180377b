"""Can one tenant find out by timing what another one has just asked?

An attacker guesses a prompt and measures its time to first token; in half of the trials the victim has just sent
exactly that prompt, in the others another one of the same length. The score is the AUC of "faster means the victim
sent it": 0.5 is chance, 1.0 is certainty. In-process and without HTTP, so with less noise than any real attacker has:
keys, tokenizer and engine are the real ones.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common.output_collector import OutputCollector
from benchmarks.common.prompts import WORDS, text_of
from serve_app.api.request import ChatRequest
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.prompts import PublicPromptConfig
from serve_app.engine.core.build import build_engine
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import EngineRequest
from serve_app.engine.settings import EngineSettings
from serve_app.generation.prepare import Limits, Preparer
from serve_app.prompts.registry import Prompts
from serve_app.tenants.tenants import Tenant, Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer

ATTACKER, VICTIM = "attacker", "victim"
SECRET = b"a benchmark's secret, 32 bytes.."


@dataclass(frozen=True, slots=True)
class Outcome:
    """Cached tokens, of prompts that the victim had sent and of prompts that nobody had: what time is made of.

    All prompts are equally long, so that the fewer are cached the more are computed.
    """

    sent: list[int]
    unsent: list[int]


def auc(positive: Sequence[float], negative: Sequence[float]) -> float:
    """Return the probability that a random positive is above a random negative, ties counting half."""
    over = np.subtract.outer(np.asarray(positive), np.asarray(negative))
    return float(((over > 0).sum() + 0.5 * (over == 0).sum()) / over.size)


class Stage:
    """A tokenizer, the keys of two tenants, and one engine; the public prompt is the system prompt of both."""

    def __init__(self, model_path: Path, mode: str, *, public_tokens: int, guess_tokens: int) -> None:
        # In one trust group the attack has to work: it is the control.
        group = "friends" if mode.startswith("trust_group") else None
        self._tenants = {name: Tenant(name, group) for name in (ATTACKER, VICTIM)}
        self._guess_tokens = guess_tokens
        self._system: str | None = None
        configs = []
        if mode.endswith("public_prompt"):
            self._system = text_of(public_tokens, model_path, 0)
            configs.append(PublicPromptConfig(name="rules", version="1", text=self._system, file=None, sha256=None))
        tokenizer = PromptTokenizer(model_path, cache_bytes=64 << 20, block_size=16)
        self._words = [f" {word}" for word in WORDS if len(tokenizer.encode(f" {word}", b"\0" * 16).token_ids) == 1]
        prompts = Prompts(configs)
        prompts.install(tokenizer)
        self._preparer = Preparer(
            load_checkpoint_info(model_path), tokenizer, Tenants([], SECRET), SECRET,
            AdapterRegistry("demo"), Limits(8192, 1), prompts,
        )  # fmt: skip
        settings = EngineSettings(num_blocks=8192, max_model_len=8192, num_threads=1, dtype="float32")
        self._engine: TorchEngine = build_engine(model_path, settings, lambda _: None)
        self._engine.start()
        self._loop = asyncio.new_event_loop()
        self._number = 0

    def close(self) -> None:
        """Stop the engine."""
        self._engine.stop()
        self._loop.close()

    def text(self, number: int) -> str:
        """Return the prompt of this number, as secret as any; all have the same number of tokens."""
        return "".join(random.Random(number).choices(self._words, k=self._guess_tokens))  # a workload, not a secret

    def ask(self, tenant: str, text: str) -> int:
        """Send one chat, wait for its first token, and return how many were cached."""
        messages = [{"role": "user", "content": text}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        wanted = ChatRequest(model="demo", messages=tuple(messages), max_tokens=1, temperature=0.0)
        self._number += 1
        collector = OutputCollector()
        work = self._preparer.prepare(wanted, self._tenants[tenant], f"r{self._number}")
        (generation,) = self._loop.run_until_complete(work)
        request = EngineRequest(
            generation.request_id, generation.token_ids, generation.scope, generation.root, generation.sampling,
            generation.block_hashes, tenant,
        )  # fmt: skip
        collector.answer_all(self._engine, [request])
        return collector.cached_tokens[request.request_id]


def attack(stage: Stage, trials: int, seed: int) -> Outcome:
    """Run ``trials`` guesses, half of them right, in random order; prompts never repeat."""
    for number in range(8):
        stage.ask((ATTACKER, VICTIM)[number % 2], stage.text(10_000_000 + number))
    right = [trial % 2 == 0 for trial in range(trials)]
    random.Random(seed).shuffle(right)  # a workload, not a secret
    outcome = Outcome([], [])
    for trial, is_right in enumerate(right):
        guess, other = stage.text(2 * trial + 1), stage.text(2 * trial + 2)
        stage.ask(VICTIM, guess if is_right else other)
        (outcome.sent if is_right else outcome.unsent).append(stage.ask(ATTACKER, guess))
    return outcome
