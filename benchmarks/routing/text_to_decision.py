"""From the text of a long conversation to a routing decision, on the ingress' own path: template, ids, hashes, choice.

The history has been seen before, as in any conversation's next turn; every measured request ends with a new question.
"""

from __future__ import annotations

import asyncio
import time
from random import Random

from benchmarks.common.report import percentile
from router.core import RoutingCore
from router.protocol.events import BlocksStored, LoadReport
from router.settings import RouterSettings
from serve_app.api.request import ChatRequest
from serve_app.checkpoints.adapter_registry import AdapterRegistry
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.generation.dispatch import route_of
from serve_app.generation.generation import Generation
from serve_app.generation.prepare import Limits, Preparer
from serve_app.tenants.tenants import Tenant, Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer

TEXT_TOKENS = 100_000
REPLICAS = 64
RUNS = 50
BLOCK_SIZE = 16
SECRET = bytes(32)
WORDS = (
    "the of and to in is that for it was on are as with his they at be this from have or by one had not but what "
    "all were when we there can an your which their said if do will each about how up out them then she many some "
    "so these would other into has more her two like him see time could no make than first been its who now people"
).split()


def measure_text(model: str, seed: int) -> dict[str, float]:
    """Return milliseconds from a chat's messages to its decision, and the tokens of the conversation."""
    return asyncio.run(_measure(model, seed))


async def _measure(model: str, seed: int) -> dict[str, float]:
    path = resolve_model(model)
    tokenizer = PromptTokenizer(path, block_size=BLOCK_SIZE)
    preparer = Preparer(
        load_checkpoint_info(path),
        tokenizer,
        Tenants([], SECRET),
        SECRET,
        AdapterRegistry(model),
        Limits(max_model_len=2 * TEXT_TOKENS, default_max_tokens=16),
    )
    rng = Random(seed)
    core = RoutingCore("benchmark", RouterSettings(block_size=BLOCK_SIZE), rng=rng)
    names = [f"replica-{number}" for number in range(REPLICAS)]
    core.update_replicas(names)
    for name in names:
        core.apply(name, "e", [LoadReport(rng.randrange(8000), 4, 1, 64, 256, 5000.0, 0.02)])

    async def prepare(messages: list[dict[str, str]]) -> Generation:
        chat = ChatRequest(model=model, messages=tuple(messages))
        return (await preparer.prepare(chat, Tenant("default"), f"{len(messages)}-{rng.random()}"))[0]

    history = [{"role": "system", "content": text(rng, 2000)}]
    tokens = 0
    while tokens < TEXT_TOKENS:
        history += [{"role": "user", "content": text(rng, 60)}, {"role": "assistant", "content": text(rng, 300)}] * 8
        history[-16:] = [{**message, "content": text(rng, len(message["content"]) // 5)} for message in history[-16:]]
        known = await prepare(history)
        tokens = len(known.token_ids)
    for name in rng.sample(names, 3):
        core.apply(name, "e", [BlocksStored(known.block_hashes)])
    taken_ms = []
    for _ in range(RUNS):
        messages = [*history, {"role": "user", "content": text(rng, 30)}]
        started = time.perf_counter()
        generation = await prepare(messages)
        decision = core.decide(route_of(generation))
        taken_ms.append(1000 * (time.perf_counter() - started))
        assert decision is not None
        assert decision.best_cached_tokens > tokens - 100
        core.release(decision)
    return {
        "text_to_decision_ms_p50": percentile(taken_ms, 50),
        "text_to_decision_ms_p99": percentile(taken_ms, 99),
        "text_tokens": tokens,
    }


def text(rng: Random, words: int) -> str:
    """Return words in random order."""
    return " ".join(rng.choices(WORDS, k=words))
