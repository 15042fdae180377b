"""A proxy on loopback that records what clients send to a server, and a scripted model for long loops."""

import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from router.protocol.block_hash import HASH_BYTES
from serve_app.engine.protocol import EngineOutput, EngineRequest, FirstToken
from serve_app.generation.answer import TakeOutput
from tests.serve_app.generation.outputs import output
from tests.serve_app.ingress.scripted import Script

_HOP = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}
SUMMARY = re.compile(r"detailed summary|handoff summary|state_snapshot|summary of (the|our|this) conversation", re.I)
STEP = re.compile(r"(\w+)-step-(\d+)")


@dataclass
class Recorder:
    """Passes requests on to ``url``, and keeps each with its answer in ``seen``; ``file``: also as JSON lines."""

    url: str
    file: Path | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)

    def application(self) -> Starlette:
        self._client = httpx.AsyncClient(timeout=600, trust_env=False)
        methods = ["GET", "POST", "DELETE", "HEAD"]
        return Starlette(routes=[Route("/{path:path}", self._pass_on, methods=methods)])

    async def _pass_on(self, request: Request) -> Response:
        body = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        url = f"{self.url}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        sent = self._client.build_request(request.method, url, headers=headers, content=body)
        answer = await self._client.send(sent, stream=True)
        row: dict[str, Any] = {
            "at": time.time(), "method": request.method, "path": request.url.path, "query": request.url.query,
            "headers": dict(request.headers), "status": answer.status_code, "answer_headers": dict(answer.headers),
        }  # fmt: skip
        try:
            row["body"] = json.loads(body)
        except ValueError:
            row["body"] = body.decode("utf-8", "replace")
        self.seen.append(row)

        async def parts() -> AsyncIterator[bytes]:
            told = b""
            try:
                async for part in answer.aiter_raw():
                    told += part
                    yield part
            finally:
                row["answer"] = told.decode("utf-8", "replace")
                await answer.aclose()
                if self.file is not None:
                    with self.file.open("a") as out:
                        out.write(json.dumps(row) + "\n")

        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
        return StreamingResponse(parts(), answer.status_code, headers=kept)


@dataclass
class Director(Script):
    """A model that follows plans: ``plans[task]`` are its answers in order, after ``task-step-0``, ``-1``, ...

    It reads the first task and the task's highest step in the prompt. A prompt without a task gets ``other``, one that
    asks for a summary, by its last characters, the task and its step. It caches every block of prompts and answers.
    """

    plans: Mapping[str, Sequence[str]] = field(default_factory=dict)
    other: str = "A title"
    blocks: set[bytes] = field(default_factory=set)

    async def generate(
        self, generation: EngineRequest, *, take: TakeOutput | None = None
    ) -> AsyncGenerator[EngineOutput, None]:
        self.asked.append(generation)
        ids = self.tokenizer.encode(self.text_after(self.prompt()), b"r" * 16).token_ids.tolist()
        whole = self.tokenizer.encode_ids([*generation.token_ids.tolist(), *ids], generation.root)
        chain = [whole.block_hashes[at : at + HASH_BYTES] for at in range(0, len(whole.block_hashes), HASH_BYTES)]
        own = (len(generation.token_ids) - 1) // self.tokenizer.block_size
        found = next((number for number, block in enumerate(chain[:own]) if block not in self.blocks), own)
        self.blocks.update(chain)
        first = FirstToken(found * self.tokenizer.block_size)
        for at in range(0, len(ids), 8):
            yield output(tuple(ids[at : at + 8]), None if at else first, "stop" if at + 8 >= len(ids) else None)

    def text_after(self, prompt: str) -> str:
        """Return the answer to a prompt."""
        steps = STEP.findall(prompt)
        task = next((task for task, _ in steps if task in self.plans), None)
        if task is None:
            return self.other
        step = max(int(number) for name, number in steps if name == task)
        if SUMMARY.search(prompt.rsplit("<|im_start|>user", 1)[-1]):
            return f"<summary>The work goes on: {task}-step-{step}.</summary>"
        plan = self.plans[task]
        return plan[step] if step < len(plan) else "All is done."
