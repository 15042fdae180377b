"""A server that speaks the public forms of vLLM, SGLang or TensorRT-LLM, without a model; honest, or hostile if asked.

Its tokens follow from those before them, so an answer that goes on elsewhere has the same ones. Its cache is the model
of vLLM's pool. vLLM's forms are those of vLLM 0.32, SGLang's those of 0.5.23 (its wheel does not run on CPUs). It runs
in a thread of the test (``doubles``), where ``Lie`` takes its words, or in a process of its own (``processes``).

`python -m tests.harness.worker_double --port P --events P --replay P [--kind vllm|sglang|tensorrt_llm] ...`
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import xxhash
from aiohttp import web
from msgspec import structs

from router.vllm_events.batches import BlockRemoved, BlockStored, KvEvent
from serve_app.cli.local_ray import held_port
from tests.harness.eventually import eventually
from tests.router.vllm_events.pool_model import PoolModel, Publisher, encode

ROOT = Path(__file__).parents[2]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Lie = Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]
"""Answers a request in place of the honest handler, which it may ask."""


def following(tokens: list[int], vocab: int) -> int:
    """Return the only token that follows these, never the lowest 16, which may be special."""
    return 16 + xxhash.xxh3_64_intdigest(str(tokens[-5:]).encode()) % (vocab - 16)


class Double:
    """One server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lies: dict[str, Lie] = {}
        """By path."""
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        """Path, headers and body of all requests."""
        self.pool = PoolModel(options.blocks, options.block_size)
        self.running = 0
        self.loras: dict[str, str] = {}
        self.publisher = None
        if options.events:
            replay = f"tcp://127.0.0.1:{options.replay}" if options.replay else "inproc://none"
            self.publisher = Publisher(f"tcp://127.0.0.1:{options.events}", replay)
        self.tokenizer: Any = None
        if options.tokenizer:
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(options.tokenizer)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20, middlewares=[self.with_key, self.with_lies])
        app.on_response_prepare.append(self.with_cookie)
        get, post = web.get, web.post
        app.add_routes([get("/v1/models", self.models), get("/version", self.version), get("/health", self.health)])
        app.add_routes(
            [get("/metrics", self.metrics), get("/openapi.json", self.openapi), post("/tokenize", self.tokens)]
        )
        if self.options.kind == "sglang":
            app.add_routes([get("/server_info", self.info), post("/generate", self.generate)])
        else:
            app.add_routes([post("/v1/completions", self.complete), post("/v1/load_lora_adapter", self.load)])
            app.add_routes([post("/v1/unload_lora_adapter", self.unload)])
        return app

    @web.middleware
    async def with_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        key = self.options.key
        if (
            key
            and request.path.startswith(("/v1", "/generate"))
            and request.headers.get("Authorization") != f"Bearer {key}"
        ):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)  # type: ignore[no-any-return]

    async def with_cookie(self, _: web.Request, answer: web.StreamResponse) -> None:
        if self.options.cookie:
            answer.headers["Set-Cookie"] = self.options.cookie

    @web.middleware
    async def with_lies(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.asked.append((request.path, dict(request.headers), await request.read()))
        lie = self.lies.get(request.path)
        return await (handler(request) if lie is None else lie(request, handler))  # type: ignore[no-any-return]

    async def models(self, _: web.Request) -> web.Response:
        owner = self.options.owner or self.options.kind
        card = {"id": self.options.model, "owned_by": owner, "root": self.options.model, "max_model_len": 4096}
        cards = [
            {"id": name, "owned_by": owner, "root": path, "parent": card["id"]} for name, path in self.loras.items()
        ]
        return web.json_response({"data": [card, *cards]})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.23", "page_size": self.pool.size, "model_path": self.options.model})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, _: web.Request) -> web.Response:
        told = f'vllm:cache_config_info{{block_size="{self.pool.size}",num_gpu_blocks="{self.options.blocks}"}} 1.0\n'
        name = "sglang:num_running_reqs" if self.options.kind == "sglang" else "vllm:num_requests_running"
        return web.Response(text=f'{told}{name}{{model_name="m"}} {self.running}.0\n')

    async def openapi(self, _: web.Request) -> web.Response:
        fields = {
            "vllm": "model prompt cache_salt seed structured_outputs priority return_token_ids logprobs "
            "prompt_logprobs logprob_token_ids allowed_token_ids bad_words",
            "tensorrt_llm": "model prompt stream stream_options max_tokens temperature detokenize stop_token_ids "
            "ignore_eos" + " cache_salt" * (not self.options.unsalted),
            "sglang": "input_ids cache_salt",
        }[self.options.kind]
        schema = {"properties": dict.fromkeys(fields.split(), 1)}
        schemas = {"CompletionRequest": schema, "GenerateReqInput": schema}
        return web.json_response({"components": {"schemas": schemas}})

    async def tokens(self, request: web.Request) -> web.Response:
        if self.tokenizer is None:
            return web.Response(status=404)
        text = (await request.json())["prompt"] + "?" * self.options.other_tokenizer
        return web.json_response({"tokens": self.tokenizer.encode(text, add_special_tokens=False).ids})

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["lora_name"] in self.loras:
            return web.json_response({"error": {"message": "has already been loaded", "code": 400}}, status=400)
        self.loras[body["lora_name"]] = body["lora_path"]
        return web.Response()

    async def unload(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.loras.pop((await request.json())["lora_name"], "") else 404)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.options.kind == "tensorrt_llm" and "min_p" in body:
            return web.json_response({"message": "extra fields are not permitted"}, status=422)
        if body.get("priority"):
            return web.json_response({"error": {"message": "no priority scheduling", "code": 400}}, status=400)
        prompt, most = body["prompt"], body["max_tokens"]
        if len(prompt) + most > 4096:
            return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)
        lora = body["model"] if body["model"] != self.options.model else None
        if lora and lora not in self.loras:
            return web.json_response({"error": {"message": "no such model", "code": 404}}, status=404)
        answer, untold = web.StreamResponse(headers={"Content-Type": "text/event-stream"}), list(prompt)
        await answer.prepare(request)
        async for ids, finish, cached in self.run(
            prompt, most, body.get("cache_salt"), lora, set(body["stop_token_ids"])
        ):
            choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": ids, "finish_reason": finish}
            if untold and self.options.kind == "vllm":  # in the first event
                choice["prompt_token_ids"], untold = untold, []
            if body.get("logprobs") is not None:
                names = [f"token_id:{token}" for token in ids]
                tops = [{f"token_id:{token}": -0.5, "token_id:9": -1.0} for token in ids]
                choice["logprobs"] = {"tokens": names, "token_logprobs": [-0.5] * len(ids), "top_logprobs": tops}
            await answer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            if finish:
                usage: dict[str, Any] = {"prompt_tokens": len(prompt)}
                if not self.options.untold:
                    usage["prompt_tokens_details"] = {"cached_tokens": cached}
                await answer.write(
                    b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
                )
        return answer

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body["sampling_params"]
        answer, out = web.StreamResponse(headers={"Content-Type": "text/event-stream"}), list[int]()
        await answer.prepare(request)
        stops = set(params["stop_token_ids"])
        lora, salt = body.get("lora_path"), body.get("cache_salt")
        async for ids, finish, cached in self.run(body["input_ids"], params["max_new_tokens"], salt, lora, stops):
            out += ids
            meta: dict[str, Any] = {"completion_tokens": len(out), "cached_tokens": cached, "finish_reason": None}
            if finish:
                meta["finish_reason"] = {"type": finish}
            await answer.write(
                b"data: " + json.dumps({"text": "", "output_ids": out, "meta_info": meta}).encode() + b"\n\n"
            )
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def run(self, prompt: list[int], most: int, salt: str | None, lora: str | None, stops: set[int]) -> Any:
        """Yield the tokens of each step, the finish reason and the prompt's cached tokens."""
        tokens = list(prompt)
        root = bytes.fromhex(salt) if salt and not self.options.unsalted else b""
        before = len(self.pool.events)
        while (request := self.pool.begin(root, lora, tokens, len(prompt))) is None:
            await asyncio.sleep(0.005)
            before = len(self.pool.events)
        # Only hits were there before; ``begin`` has announced the others as stored.
        new = sum(len(event.block_hashes) for event in self.pool.events[before:] if isinstance(event, BlockStored))
        cached = (len(prompt) // self.pool.size - new) * self.pool.size
        self.running += 1
        try:
            await asyncio.sleep(self.options.token_s + (len(prompt) - cached) * self.options.prefill_s)
            self.publish()  # as vLLM, once the prompt is computed
            for at in range(most):
                tokens.append(following(tokens, self.options.vocab))
                if not self.pool.proceed(request, len(tokens)):
                    self.pool.proceed(request, len(prompt))
                self.publish()
                finish = "stop" if tokens[-1] in stops else "length" if at == most - 1 else None
                yield [tokens[-1]], finish, cached
                if finish:
                    return
                await asyncio.sleep(self.options.token_s)
        finally:
            self.running -= 1
            self.pool.end(request)
            self.publish()

    def publish(self) -> None:
        events = self.pool.take_events()
        if self.publisher is None or not events or self.options.silent:
            return
        if self.options.old:  # before events had salts
            events = [structs.replace(e, extra_keys=None) if isinstance(e, BlockStored) else e for e in events]
        if self.options.lies:  # it tells of blocks that it does not keep
            self.pool.content.clear()
            events = [event for event in events if not isinstance(event, BlockRemoved)]
        if self.options.kind == "sglang":
            for event in map(as_sglang, events):
                self.publisher.send(msgspec.msgpack.encode([1.0, [event], 0]))
            return
        self.publisher.send(encode(events))


def as_sglang(event: KvEvent) -> dict[str, Any]:
    """Return an event in SGLang's form: the salt in a field of its own, and no extra keys or groups."""
    told = msgspec.to_builtins(event, builtin_types=(bytes,))
    salts = [key for keys in told.pop("extra_keys", None) or () for key in keys or ()]
    for name in ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "lookahead_token_ids"):
        told.pop(name, None)
    for name in ("block_hashes", "parent_block_hash"):
        if (value := told.get(name)) is not None:
            told[name] = [_short(each) for each in value] if isinstance(value, list) else _short(value)
    if told["type"] == "BlockStored":
        told["cache_salt"] = salts[-1] if salts else "0" * 32
    return {name: value for name, value in told.items() if value is not None or name == "parent_block_hash"}


def _short(name: bytes) -> int:
    return int.from_bytes(name[:8], "big", signed=True)


@dataclass
class Process:
    """A double in a process of its own."""

    options: dict[str, Any]
    port: int
    events: int
    replay: int
    process: subprocess.Popen[bytes] | None = None
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def entry(self) -> str:
        """It as an entry of ``workers``."""
        return f"{self.url}?events={self.events}&replay={self.replay}"

    def start(self, **changed: Any) -> None:
        """Start it, with an empty cache, and wait until it answers."""
        options = {"port": self.port, "events": self.events, "replay": self.replay, **self.options, **changed}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "tests.harness.worker_double", *flags]
        self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        eventually(lambda: httpx.get(f"{self.url}/health").is_success, 60, failures=(httpx.TransportError,))

    def kill(self) -> None:
        """End it at once, as a machine that loses its power."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def pause(self, *, stop: bool) -> None:
        """Freeze it, or let it go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP if stop else signal.SIGCONT)


class Here:
    """A double in a thread of this process: it starts within milliseconds, and lies if asked to."""

    def __init__(self, options: dict[str, Any], port: int, events: int, replay: int) -> None:
        self.options, self.port, self.events, self.replay = options, port, events, replay
        self.url = f"http://127.0.0.1:{port}"
        self.entry = f"{self.url}?events={events}&replay={replay}"
        self.double: Double | None = None
        self.lies: dict[str, Lie] = {}
        """By path; they outlive a restart."""

    @property
    def asked(self) -> list[tuple[str, dict[str, str], bytes]]:
        """What this double was asked since its start."""
        assert self.double is not None
        return self.double.asked

    def start(self, **changed: Any) -> None:
        """Start it, with an empty cache, and wait until it answers."""
        options = {**DEFAULTS, "port": self.port, "events": self.events, "replay": self.replay}
        self.double = double = Double(argparse.Namespace(**{**options, **self.options, **changed}))
        double.lies = self.lies
        self._loop = asyncio.new_event_loop()
        self._runner = web.AppRunner(double.app(), shutdown_timeout=0.0)
        listening = threading.Event()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._runner.setup())
            site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
            self._loop.run_until_complete(site.start())
            listening.set()
            self._loop.run_forever()
            self._loop.close()

        self._thread = threading.Thread(target=run, name="worker-double", daemon=True)
        self._thread.start()
        assert listening.wait(60)

    def kill(self) -> None:
        """Break off all connections, and forget everything."""
        if self.double is None:
            return

        async def end() -> None:
            for connection in list(self._runner.server.connections if self._runner.server else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if self.double.publisher is not None:
            self.double.publisher.stop()
        self.double = None


@contextmanager
def doubles(count: int, **options: Any) -> Iterator[list[Here]]:
    """Run some doubles in threads until the block ends."""
    with _started(Here, count, options) as made:
        yield made


@contextmanager
def processes(count: int, **options: Any) -> Iterator[list[Process]]:
    """Run some doubles in processes of their own until the block ends."""
    with _started(Process, count, options) as made:
        yield made


@contextmanager
def _started(kind: Callable[..., Any], count: int, options: dict[str, Any]) -> Iterator[list[Any]]:
    with ExitStack() as stack:
        ports = [stack.enter_context(held_port()) for _ in range(3 * count)]
        made = [kind(options, *three) for three in zip(ports[::3], ports[1::3], ports[2::3], strict=True)]
        for double in made:
            stack.callback(double.kill)
            double.start()
        yield made


DEFAULTS: dict[str, Any] = {
    "port": 0, "events": 0, "replay": 0, "kind": "vllm", "owner": "", "model": "demo", "key": "", "tokenizer": "",
    "blocks": 400, "block_size": 16, "vocab": 300, "token_s": 0.002, "prefill_s": 0.0, "lies": 0, "untold": 0,
    "unsalted": 0, "other_tokenizer": 0, "silent": 0, "old": 0, "cookie": "",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, type=type(default))
    options = parser.parse_args()
    web.run_app(Double(options).app(), host="127.0.0.1", port=options.port, print=None, handle_signals=False)


if __name__ == "__main__":
    main()
