"""Cores are killed in the middle of answers in 16 bits: each answer goes on at the other engine, and ends whole.

``WARMPATH_CORE_KILLS``: how many. The ingress' own router, dispatcher and readers of answers send it there.
"""

import asyncio
import json
import os
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs

from benchmarks.common.random_adapters import make_adapters
from router.core import RoutingCore
from serve_app.checkpoints.adapter_registry import AdapterEntry, AdapterRegistry
from serve_app.checkpoints.checkpoint import CheckpointInfo, load_checkpoint_info
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import AdapterSpec, Engine, EngineOutput, EngineRequest, to_wire
from serve_app.engine.token_channel import TokenStream
from serve_app.engine.vllm.engine import VllmEngine
from serve_app.generation.prepare import Limits, Preparer
from serve_app.prompts.registry import Prompts
from serve_app.replica.engine_factory import make_engine
from serve_app.replica.running_calls import RunningCalls
from serve_app.structured.compiler import GrammarCompiler
from serve_app.structured.matcher import Matchers
from serve_app.tenants import Tenants
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.harness.crashes.calls import BreakingReplicas, CallCrashes
from tests.harness.crashes.questions import ADAPTERS, PROMPT, Question, Questions, Reply
from tests.harness.eventually import eventually
from tests.vllm.engines import BLOCK

KILLS = int(os.environ.get("WARMPATH_CORE_KILLS", 2))
CLIENTS = 8
NAMES = ("replica-0", "replica-1")
_SECRET = b"killed cores, not a secret......"


class Cores(BreakingReplicas):
    """Replicas, each with a core of vLLM. ``tokens``: of each generation, by its attempts."""

    tokens: dict[str, list[list[int]]]
    _engines: dict[str, Engine]

    def use(self, name: str, engine: Engine) -> None:
        """Have this engine in a replica."""
        self._engines[name] = engine
        self._running[name] = RunningCalls(self, engine.cancel)  # type: ignore[arg-type]

    def close(self, name: str) -> None:
        """Take it that a replica ends, as its process does."""
        self._running[name].closed = True

    def running(self, name: str) -> list[str]:
        """Return the generations of a replica with a token and not yet their end."""
        return [call for call, one in self._running[name]._calls.items() if one.tokens and not one.end.done()]

    async def _answer(self, call: EngineRequest, replica_id: str, after: int | None) -> bytes:
        engine, loop, calls = self._engines[replica_id], asyncio.get_running_loop(), self._running[replica_id]
        running = calls.begin(call, TokenStream(call.interval_s))
        self.tokens.setdefault(call.request_id.rpartition(".")[0], []).append(tokens := [])

        def hear(outputs: Sequence[EngineOutput]) -> None:
            tokens.extend(token for output in outputs for token in output.token_ids)
            loop.call_soon_threadsafe(calls.deliver, outputs)

        try:
            matcher = self._matchers.matcher(call.grammar) if call.grammar else None
            engine.submit(structs.replace(call, matcher=matcher), hear)
            return to_wire(await running.end)
        finally:
            calls.forget(call.request_id)
            engine.cancel(call.request_id)


@dataclass
class Fleet:
    """Two engines, and what is asked of them."""

    info: CheckpointInfo
    specs: list[AdapterSpec]
    crashes: CallCrashes
    cores: Cores
    router: RoutingCore
    engines: dict[str, VllmEngine] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start a replica's engine, with its adapters."""
        config = AppConfig(
            engine="vllm", block_size=BLOCK, num_blocks=128, max_model_len=1024, dtype="bfloat16", device="cpu",
            max_num_seqs=16, max_num_batched_tokens=256, max_waiting_requests=256, enforce_eager=True, num_threads=1,
            allow_runtime_lora=True, max_loras=2, max_cpu_loras=2, max_lora_rank=8, pin_budget=24,
        )  # fmt: skip
        engine = make_engine(config, self.info, lambda _: None)
        assert isinstance(engine, VllmEngine)
        assert not engine.settings.exact
        engine.start()
        for spec in self.specs:
            engine.adapters.load(spec)
        self.engines[name] = engine

    async def enter(self, name: str) -> None:
        """Start a replica, and tell the router."""
        await asyncio.to_thread(self.start, name)
        self.cores.use(name, self.engines[name])
        self.router.update_replicas([*self.engines])

    async def leave(self, name: str) -> None:
        """Remove a replica, once it knows that its core has died."""
        engine = self.engines.pop(name)
        await asyncio.to_thread(eventually, lambda: not engine.healthy())
        self.router.update_replicas([*self.engines])
        self.cores.close(name)
        await asyncio.to_thread(engine.stop)


@asynccontextmanager
async def fleet(model: Path, directory: Path, rng: random.Random) -> AsyncIterator[Fleet]:
    info = load_checkpoint_info(model)
    specs = make_adapters(model, directory / "adapters", len(ADAPTERS), rank=4)
    adapters = AdapterRegistry("demo")
    adapters.merge(AdapterEntry(spec.name, spec) for spec in specs)
    tokenizer, prompts = PromptTokenizer(model, block_size=BLOCK), Prompts([PROMPT])
    prompts.install(tokenizer)
    preparer = Preparer(info, tokenizer, Tenants([], _SECRET), _SECRET, adapters, Limits(1024, 256), prompts)
    matchers = Matchers(GrammarCompiler(info.path, info.vocab_size, info.eos_token_ids))
    crashes = CallCrashes([], BLOCK, preparer, tokenizer, matchers, rng, kind=Cores)
    assert isinstance(crashes.replicas, Cores)
    crashes.replicas.tokens = {}
    made = Fleet(info, specs, crashes, crashes.replicas, crashes.core)
    for name in NAMES:
        await made.enter(name)
    try:
        yield made
    finally:
        for engine in made.engines.values():
            await asyncio.to_thread(engine.stop)


def core_of(engine: VllmEngine) -> psutil.Process:
    """Return the process of vLLM's core."""
    (core,) = engine._frontend.llm.engine_core.resources.engine_manager.processes
    return psutil.Process(core.pid)


def check(question: Question, reply: Reply, choices: int) -> None:
    """Check an answer by its request alone: 16 bits do not promise its tokens."""
    body = question.body
    assert len(reply.choices) == choices
    reasons = [reason for _, reason in reply.choices]
    assert set(reasons) <= {"stop", "length"}, reply
    if set(reasons) == {"length"}:
        assert reply.completion_tokens == choices * body["max_tokens"]
    if not body.keys() & {"stop", "structured_outputs"}:  # a grammar may allow no more tokens
        assert reply.completion_tokens >= choices * body.get("min_tokens", 0)
    ends = body.get("include_stop_str_in_output", False)
    for text, reason in reply.choices:
        if not ends:
            assert not [stop for stop in body.get("stop", ()) if stop in text]
        if reason == "stop" and not ends and "stop" not in body and "structured_outputs" in body:
            assert follows(body["structured_outputs"], text), (body, text)


def follows(grammar: Mapping[str, Any], text: str) -> bool:
    if "choice" in grammar:
        return text in grammar["choice"]
    if "regex" in grammar:
        return re.fullmatch(grammar["regex"], text) is not None
    return isinstance(json.loads(text), dict)


@pytest.mark.timeout(900 + 20 * KILLS)
@pytest.mark.anyio
async def test_answers_of_a_killed_core_end_whole_elsewhere(demo_model_path: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    questions, found = Questions(rng, has_logits=True), Counter[str]()
    over = asyncio.Event()
    async with fleet(demo_model_path, tmp_path, rng) as run:

        async def client() -> None:
            while not over.is_set():
                question = questions.draw()
                question = Question(question.path, {**question.body, "max_tokens": rng.choice([32, 64, 96])})
                if rng.random() < 0.3:
                    alone = await run.crashes.answer(*await run.crashes.prepare(question))
                    assert isinstance(alone, Reply), alone
                    question = questions.with_stops(question, alone)
                prepared = await run.crashes.prepare(question)
                reply, first = await run.crashes.answered(*prepared)
                assert isinstance(reply, Reply), reply
                check(question, reply, len(prepared[1]))
                found["answers"] += 1
                attempts = [run.cores.tokens[name] for name in first]
                if not any(len(own) > 1 for own in attempts):
                    continue
                found["interrupted"] += 1
                _, second = await run.crashes.answered(*prepared)
                for own, again in zip(attempts, (run.cores.tokens[name] for name in second), strict=True):
                    if len(own) > 1 and own[0] and len(again) == 1:
                        cut = sum(map(len, own[:-1]))
                        rest, undisturbed = own[-1], again[0][cut:]
                        found["tokens after a break"] += max(len(rest), len(undisturbed))
                        same = sum(one == other for one, other in zip(rest, undisturbed, strict=False))
                        found["equal tokens"] += same

        clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
        for kill in range(KILLS):
            name = NAMES[kill % 2]
            while not run.cores.running(name):
                await asyncio.sleep(0.005)
                for one in clients:
                    if one.done():
                        one.result()
            core_of(run.engines[name]).kill()
            await run.leave(name)
            await run.enter(name)
            print(f"{kill + 1} of {KILLS} kills: {dict(found)}")
        over.set()
        await asyncio.gather(*clients)
        assert any(len(own) > 1 for own in run.cores.tokens.values())
