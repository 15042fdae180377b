"""A server that speaks vLLM's forms and answers at once, without a model: what stands before it is all that takes time.

`python -m benchmarks.peers.without_model --port PORT --model NAME`
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from benchmarks.common.server import server_process
from serve_app.cli.local_ray import held_port

BLOCK, BLOCKS, MAX_MODEL_LEN = 32, 4096, 4096
_FIELDS = "model prompt cache_salt seed priority return_token_ids logprobs prompt_logprobs allowed_token_ids bad_words"


@contextmanager
def server_without_model(name: str) -> Iterator[str]:
    """Run such a server of the model ``name``; yield its URL. Raises BenchmarkError if it does not start."""
    with held_port() as port:
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", __name__, "--port", str(port), "--model", name]
        with server_process(command, f"{url}/health"):
            yield url


def _app(name: str) -> web.Application:
    head = {"id": "a", "object": "chunk", "model": name, "created": 1}

    async def tell(request: web.Request, choice: dict[str, Any], prompt_tokens: int) -> web.StreamResponse:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "total_tokens": prompt_tokens + 1}
        told: list[dict[str, Any]] = [{"choices": [{"index": 0, "finish_reason": "length", **choice}]}]
        told.append({"choices": [], "usage": usage})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for one in told:
            await answer.write(b"data: " + json.dumps({**head, **one}).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def complete(request: web.Request) -> web.StreamResponse:
        ids = (await request.json())["prompt"]
        return await tell(request, {"text": "", "token_ids": [20], "prompt_token_ids": ids}, len(ids))

    async def chat(request: web.Request) -> web.StreamResponse:
        await request.json()
        return await tell(request, {"delta": {"role": "assistant", "content": "a"}}, 1)

    async def models(_: web.Request) -> web.Response:
        card = {"id": name, "object": "model", "owned_by": "vllm", "root": name, "max_model_len": MAX_MODEL_LEN}
        return web.json_response({"object": "list", "data": [card]})

    async def schema(_: web.Request) -> web.Response:
        fields: dict[str, Any] = {"properties": {field: {} for field in _FIELDS.split()}}
        return web.json_response({"components": {"schemas": {"CompletionRequest": fields}}})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            text=f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{BLOCKS}"}} 1.0\n'
            f'vllm:num_requests_running{{model_name="{name}"}} 0.0\n'
        )

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    app = web.Application()
    asked = {"/v1/models": models, "/openapi.json": schema, "/metrics": metrics, "/health": health, "/version": version}
    app.add_routes([web.get(path, handler) for path, handler in asked.items()])
    app.add_routes([web.post("/v1/completions", complete), web.post("/v1/chat/completions", chat)])
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    given = parser.parse_args()
    web.run_app(_app(given.model), host="127.0.0.1", port=given.port, print=None, access_log=None)
