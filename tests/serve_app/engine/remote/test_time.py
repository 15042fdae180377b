"""Each time limit of a replica before a worker, below it, at it, beyond it and a thousand times later, by a clock."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import pytest
from msgspec import structs

from router.protocol.block_hash import PrefixScope
from serve_app.engine.protocol import AdapterSpec
from serve_app.engine.remote import engine as remote
from serve_app.engine.remote.adapters import LOAD_TIMEOUT
from serve_app.engine.remote.asking import END_S
from serve_app.engine.remote.reading import PROBE_TIMEOUT
from serve_app.engine.remote.seat import HEALTH_TIMEOUT, LOOK_S, MISSED, TRIAL_S
from tests.harness.eventually import let_others_run
from tests.harness.virtual_time import passes, run_at_once
from tests.serve_app.engine.remote.test_remote import PROMPT, Outputs, Seat
from tests.serve_app.engine.tiny import request

FACTORS = (0.5, 0.99, 2.0, 1000.0)
URL = "http://worker:8000"
HEALTH_S, LOAD_S, PROBE_S = (float(limit.total or 0) for limit in (HEALTH_TIMEOUT, LOAD_TIMEOUT, PROBE_TIMEOUT))
CARDS = [{"id": "demo", "owned_by": "vllm", "root": "demo", "max_model_len": 4096}]


def event(*ids: int, finish: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"token_ids": ids, "finish_reason": finish}]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 96}}}\n\ndata: [DONE]\n\n'


@dataclass
class Worker:
    """A worker in the loop's own time, with the interface of ``WorkerHttp``. ``late_s``: of the next answers, by path.

    ``pieces``: seconds before each piece of an answer, and the piece.
    """

    late_s: dict[str, Callable[[], float]] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=lambda: [(0.0, event(20, finish="length") + USAGE)])
    asked: list[tuple[float, str]] = field(default_factory=list)
    cards: list[Any] = field(default_factory=CARDS.copy)

    @asynccontextmanager
    async def ask(self, url: str, body: bytes | None = None, within: Any = None) -> AsyncIterator[Any]:
        path = url.removeprefix(URL)
        self.asked.append((asyncio.get_running_loop().time(), path))
        async with asyncio.timeout(None if within is None else within.total):
            await passes(self.late_s.get(path, lambda: 0.0)())
        pieces = self.pieces

        class Content:
            async def iter_any(self) -> AsyncIterator[bytes]:
                for late_s, piece in pieces:
                    await passes(late_s)
                    yield piece

        class Answer:
            status, headers, content = 200, dict[str, str](), Content()

        yield Answer

    async def whole(
        self, url: str, body: bytes | None = None, most: int = 0, within: aiohttp.ClientTimeout = PROBE_TIMEOUT
    ) -> tuple[int, bytes]:
        async with self.ask(url, body, within):
            if url.endswith("/models"):
                return 200, json.dumps({"data": self.cards}).encode()
            return (200, b"") if "lora" in url else (404, b"")

    async def aclose(self) -> None:
        pass


def now_s() -> float:
    return asyncio.get_running_loop().time()


def in_its_time(
    script: Callable[[Seat, Worker], Awaitable[None]], worker: Worker | None = None, **settings: Any
) -> None:
    """Run a script beside a replica that looks after a worker, which it does not follow by events."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        there = worker or Worker()
        opened: Any = lambda _: there  # noqa: E731
        seat = Seat(
            URL,
            outside={"clock": loop.time, "open_http": opened, "loop": loop},
            enable_prefix_caching=False,
            **settings,
        )
        await seat.seat.begin()
        await script(seat, there)
        await seat.close()

    run_at_once(run())


async def fit(seat: Seat) -> None:
    while seat.seat.out:
        await passes(0.01)


def ask(seat: Seat, name: str, timeout_s: float = float("inf"), **more: Any) -> tuple[Outputs, asyncio.Event]:
    ended, out = asyncio.Event(), Outputs()

    def sink(outputs: Any) -> None:
        out(outputs)
        if name in out.finish:
            ended.set()

    seat.submit(structs.replace(request(name, PROMPT, 8, **more), timeout_s=timeout_s), sink)
    return out, ended


@pytest.mark.parametrize("factor", FACTORS)
def test_a_worker_is_looked_at_every_second(factor: float) -> None:
    async def script(seat: Seat, worker: Worker) -> None:
        await fit(seat)
        worker.asked.clear()
        await passes(LOOK_S * factor)
        looks = sum(path == "/health" for _, path in worker.asked)
        assert factor - 1 <= looks <= factor + 1

    in_its_time(script)


@pytest.mark.parametrize("factor", FACTORS)
def test_a_worker_that_is_late_some_times_in_a_row_is_dead(factor: float) -> None:
    async def script(seat: Seat, worker: Worker) -> None:
        await fit(seat)
        began_s = now_s()
        worker.late_s["/health"] = lambda: HEALTH_S * factor
        await passes((MISSED - 1) * (HEALTH_S + LOOK_S) + HEALTH_S * 0.9)
        assert seat.seat.out == "", "one late answer less is no death"
        worker.late_s["/v1/models"] = lambda: 1e6
        await passes(LOOK_S + HEALTH_S)
        assert seat.seat.out == ("" if factor < 1 else f"{URL} does not answer")
        await passes(1000 * HEALTH_S - now_s() + began_s)
        assert bool(seat.seat.out) == (factor > 1)
        worker.late_s.clear()
        await passes(PROBE_S + 2 * LOOK_S)
        assert seat.seat.out == "", "it is back"

    in_its_time(script)


def test_a_worker_that_is_late_now_and_then_or_that_sends_tokens_lives() -> None:
    async def script(seat: Seat, worker: Worker) -> None:
        await fit(seat)
        turn = iter(range(1_000_000))
        worker.late_s["/health"] = lambda: HEALTH_S * 2 * (next(turn) % MISSED > 0)
        await passes(1000)
        assert seat.seat.out == ""
        worker.late_s["/health"] = lambda: 1e6
        worker.pieces = [(0.5, event(20))] * 2000
        out = Outputs()
        seat.submit(request("a", PROMPT, 3900), out)
        await passes(900)
        assert (seat.seat.out, len(out.tokens["a"]) > 1700) == ("", True)
        await passes(100 + (MISSED + 2) * (HEALTH_S + LOOK_S))
        assert (seat.seat.out != "", out.kinds["a"]) == (True, "unavailable")

    in_its_time(script)


@pytest.mark.parametrize("factor", FACTORS)
def test_a_trial_ends_in_time(factor: float) -> None:
    late = iter([TRIAL_S * factor])

    async def script(seat: Seat, worker: Worker) -> None:
        await passes(TRIAL_S + LOOK_S / 2)
        unfit = f"{URL} does not answer a short prompt within {TRIAL_S:g} s"
        assert seat.seat.out == ("" if factor < 1 else unfit)
        await passes(LOOK_S)
        assert seat.seat.out == "", "it is tried again"

    in_its_time(script, Worker({"/v1/completions": lambda: next(late, 0.0)}))


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/metrics", "/openapi.json"])
@pytest.mark.parametrize("factor", FACTORS)
def test_facts_are_waited_for_in_time(path: str, factor: float) -> None:
    late = iter([PROBE_S * factor])

    async def script(seat: Seat, worker: Worker) -> None:
        await passes(PROBE_S * 1.02)
        assert seat.seat.out == ("" if factor < 1 or path != "/v1/models" else f"{URL} does not answer (TimeoutError)")
        await passes(LOOK_S)
        assert seat.seat.out == ""

    in_its_time(script, Worker({path: lambda: next(late, 0.0)}))


@pytest.mark.parametrize("factor", FACTORS)
def test_an_answer_waits_for_its_usage_in_time(factor: float) -> None:
    async def script(seat: Seat, worker: Worker) -> None:
        await fit(seat)
        worker.pieces = [(0.0, event(20)), (1.0, event(21, finish="length")), (END_S * factor, USAGE)]
        began_s = now_s()
        out, ended = ask(seat, "a")
        await ended.wait()
        assert now_s() - began_s == pytest.approx(1.0 + min(factor, 1.0) * END_S, abs=0.1)
        assert (out.tokens["a"], out.finish["a"]) == ([20, 21], "length")
        assert out.cached["a"] == (96 if factor < 1 else 0)

    in_its_time(script)


@pytest.mark.parametrize("factor", FACTORS)
def test_a_request_ends_at_its_own_limit(factor: float) -> None:
    async def script(seat: Seat, worker: Worker) -> None:
        await fit(seat)
        worker.pieces = [(0.0, event(20)), (30.0 * factor, event(21, finish="length") + USAGE)]
        out, ended = ask(seat, "a", timeout_s=30.0)
        await ended.wait()
        assert now_s() < 35.0
        assert (out.finish["a"], len(out.tokens["a"])) == (("length", 2) if factor < 1 else ("timeout", 1))

    in_its_time(script)


@pytest.mark.parametrize("factor", [10.5 / LOAD_S, *FACTORS])
def test_an_adapter_that_loads_slowly_loads_and_holds_no_other_up(factor: float) -> None:
    """Its first request leaves while it loads, and the next one waits for the same load."""

    async def script(seat: Seat, worker: Worker) -> None:
        await fit(seat)
        slow = PrefixScope("tiny", "slow@1")
        for name in ("slow", "quick"):
            seat.adapters.load(AdapterSpec(name, "1", f"/{name}"))
        late = iter([LOAD_S * factor])
        worker.late_s["/v1/load_lora_adapter"] = lambda: next(late, 0.0)
        began_s = now_s()
        out, left = ask(seat, "leaves", timeout_s=1.0, scope=slow)
        waiting, loaded = ask(seat, "waits", scope=slow)
        for name, scope in (("base", PrefixScope("tiny")), ("other", PrefixScope("tiny", "quick@1"))):
            done, ended = ask(seat, name, scope=scope)
            await ended.wait()
            assert (done.finish[name], now_s() - began_s < 0.1) == ("length", True)
        await left.wait()
        assert (out.finish["leaves"], round(now_s() - began_s)) == ("timeout", 1)
        await loaded.wait()
        took_s = now_s() - began_s
        assert took_s == pytest.approx(min(1.0, factor) * LOAD_S, abs=0.1)
        assert waiting.kinds["waits"] == ("" if factor < 1 else "unavailable")
        assert sum("load_lora" in path for _, path in worker.asked) == 2, "one load for each"
        again, ended = ask(seat, "again", scope=slow)
        await ended.wait()
        assert (again.finish["again"], now_s() - began_s - took_s < 0.1) == ("length", True)

    in_its_time(script)


def test_loads_end_with_the_seat() -> None:
    async def script(seat: Seat, worker: Worker) -> None:
        await fit(seat)
        seat.adapters.load(AdapterSpec("slow", "1", "/slow"))
        worker.late_s["/v1/load_lora_adapter"] = lambda: 300.0
        out, ended = ask(seat, "a", scope=PrefixScope("tiny", "slow@1"))
        await passes(1.0)
        assert seat.seat.loads.loading
        seat.seat.leave("gone")
        await ended.wait()
        await let_others_run()
        assert (out.errors["a"], seat.seat.loads.loading, seat.seat.loads.loaded) == (remote.AWAY, (), ())

    in_its_time(script)


def test_a_worker_that_comes_back_with_an_adapter_of_its_own_is_not_told_to_replace_it() -> None:
    """What it was told to load before is forgotten with it: it is another process, and may have any version."""

    async def script(seat: Seat, worker: Worker) -> None:
        for version, loads in (("2", 1), ("1", 1), ("1", 1), ("3", 3)):
            await fit(seat)
            seat.adapters.load(AdapterSpec("poet", version, f"/{version}"))
            out, ended = ask(seat, "a", scope=PrefixScope("tiny", f"poet@{version}"))
            await ended.wait()
            assert out.finish["a"] == "length"
            asked = [path for _, path in worker.asked if "lora" in path]
            assert len(asked) == loads, "the other version that it names is unloaded and loaded"
            if version == "2":
                worker.late_s["/health"] = lambda: 1e6
                while not seat.seat.out:
                    await passes(LOOK_S)
                worker.late_s.clear()
                worker.cards = [*CARDS, {"id": "poet", "owned_by": "vllm", "parent": "demo"}]

    in_its_time(script)


@pytest.mark.parametrize("tokens", [1000, 30_000, 120_000])
def test_long_prompts_may_be_repeated_to_us(tokens: int) -> None:
    """vLLM's first event has the prompt's tokens; the bound of an event follows from them."""
    ids = np.full(tokens, 1_234_567, np.int32)

    async def script(seat: Seat, worker: Worker) -> None:
        await fit(seat)
        first = {"choices": [{"token_ids": [20], "prompt_token_ids": ids.tolist(), "finish_reason": None}]}
        said = b"data: " + json.dumps(first).encode() + b"\n\n"
        worker.pieces = [(0.0, said[at : at + 65536]) for at in range(0, len(said), 65536)]
        worker.pieces.append((0.0, event(21, finish="length") + USAGE))
        out = Outputs()
        seat.submit(request("a", ids, 2), out)
        while "a" not in out.finish:
            await passes(0.1)
        assert (out.finish["a"], out.tokens["a"]) == ("length", [20, 21]), out.errors

    in_its_time(
        script, Worker(cards=[{**CARDS[0], "max_model_len": 200_000}]), max_model_len=200_000, vocab_size=1 << 21
    )
