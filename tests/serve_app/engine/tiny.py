"""Tiny fp32 models built on the spot, and helpers to run requests through an engine."""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from router.protocol.block_hash import PrefixScope
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import EngineOutput, EngineRequest, SamplingParams, TokenLogprob

SCOPE = PrefixScope("tiny")
SECRET = b"test secret"
VOCAB = 211

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
}


def save_tiny(kind: str, path: Path) -> Path:
    """Save a random model of ``kind`` ("qwen3" or "llama") with a greedy output that is not constant."""
    torch.manual_seed(7)
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=16, **SIZES))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.save_pretrained(path)
    return path


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length, dtype=np.int32)


def request(
    request_id: str,
    ids: Sequence[int] | np.ndarray,
    max_tokens: int = 8,
    *,
    scope: PrefixScope = SCOPE,
    tenant: str = "default",
    **sampling: object,
) -> EngineRequest:
    """Return a request, greedy unless ``sampling`` overrides it."""
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    ids = np.asarray(ids, dtype=np.int32)
    return EngineRequest(request_id, tenant=tenant, token_ids=ids, scope=scope, root=root_of(scope), sampling=params)


def root_of(scope: PrefixScope) -> bytes:
    """Return a request's root: the private one, after the public one if it has public blocks."""
    root = scope.private.root(SECRET)
    return scope.public.root(SECRET) + root if scope.public_blocks else root


class Collector:
    """An output sink that collects everything by request, and on which tests can wait."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.finish: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprob]] = {}
        self.batches: list[int] = []
        self._changed = threading.Condition()

    def __call__(self, outputs: Sequence[EngineOutput]) -> None:
        with self._changed:
            self.batches.append(len(outputs))
            for output in outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                self.logprobs.setdefault(output.request_id, []).extend(output.logprobs)
                assert not output.prompt_logprobs or output.request_id not in self.cached, "before the first token"
                self.prompt_logprobs.setdefault(output.request_id, []).extend(output.prompt_logprobs)
                if output.first is not None and output.first.correction:
                    self.cached[output.request_id] += output.first.cached_tokens
                elif output.first is not None:
                    assert output.request_id not in self.cached
                    self.cached[output.request_id] = output.first.cached_tokens
                if output.finish_reason:
                    assert output.request_id not in self.finish
                    self.finish[output.request_id] = output.finish_reason
                    self.errors[output.request_id] = output.message
            self._changed.notify_all()

    def wait(self, request_ids: Iterable[str], timeout_s: float = 60.0) -> None:
        wanted = set(request_ids)
        with self._changed:
            assert self._changed.wait_for(lambda: wanted <= set(self.finish), timeout_s), "requests did not finish"

    def wait_tokens(self, request_id: str, count: int, timeout_s: float = 60.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.tokens.get(request_id, ())) >= count, timeout_s)


def run_all(engine: TorchEngine, requests: Sequence[EngineRequest]) -> Collector:
    collector = Collector()
    for item in requests:
        engine.submit(item, collector)
    collector.wait(item.request_id for item in requests)
    return collector


def sample(engine: TorchEngine, name: str, /, **labels: str) -> float:
    """Return the sum of a metric's samples that carry ``labels``."""
    return sum(v for n, have, v in engine.stats().samples if n == name and labels.items() <= dict(have).items())
