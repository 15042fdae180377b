"""Answers a file's requests by a running server, over HTTP."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from serve_app.batch.batch_file import BatchRequest
from serve_app.batch.batches import usage_of
from serve_app.infer.answered import AnsweredLine

TIMEOUT_S = 3600.0
LONGEST_PAUSE_S = 30.0
WARNING = "x-warmpath-warning"
_STREAMING = ("stream", "stream_options")


class ServerUnusable(ValueError):
    """The server cannot be reached, or lacks what the file needs. The message contains the remedy."""


@dataclass(eq=False)
class RemoteBatch:
    """One run. ``model``: that of requests without one. ``explains``: the reason of a miss is asked for."""

    client: httpx.AsyncClient
    model: str
    explains: bool

    async def answer(self, index: int, request: BatchRequest) -> AnsweredLine:
        """Return a request's answer or error. A busy server is asked again. Raises ServerUnusable."""
        fields = {name: value for name, value in request.body.items() if value is not None and name not in _STREAMING}
        body = {"model": self.model, **fields}
        if request.url != "/v1/messages":
            body = {"seed": index, **body, **({"cache_diagnostics": True} if self.explains else {})}
        while True:
            begun_s = time.perf_counter()
            try:
                response = await self.client.post(request.url, json=body)
                answer = response.json()
            except (httpx.HTTPError, ValueError) as error:
                raise ServerUnusable(
                    f"{self.client.base_url} does not answer ({error or type(error).__name__})"
                ) from error
            wait_s = response.headers.get("retry-after") if response.status_code in (429, 503, 529) else None
            if wait_s is None:
                break
            await asyncio.sleep(min(float(wait_s), LONGEST_PAUSE_S))
        usage = usage_of(answer)
        miss = (answer.get("usage") or {}).get("cache_miss") if self.explains else None
        answer_id = response.headers.get("x-request-id") or uuid.uuid4().hex
        return AnsweredLine(
            line={
                "id": f"batch_req_{answer_id}",
                "custom_id": request.custom_id,
                "response": {"status_code": response.status_code, "request_id": answer_id, "body": answer},
                "error": None,
            },
            prompt_tokens=usage.get("input_tokens", 0),
            cached_tokens=usage.get("cached_tokens", 0),
            generated_tokens=usage.get("output_tokens", 0),
            total_s=time.perf_counter() - begun_s,
            save=response.headers.get(WARNING, "") if body.get("save_system_prompt_kv_cache") else "",
            why=f"{miss['reason']}: {miss['remedy']}" if miss else "",
            adapter=str(body.get("lora_name") or ""),
            warning=response.headers.get(WARNING, ""),
        )


async def open_server(client: httpx.AsyncClient, adapters: dict[str, Any]) -> str:
    """Return the name of the server's first model, once it serves all adapters. Raises ServerUnusable."""
    try:
        answer = await client.get("/v1/models")
        served = [str(model["id"]) for model in answer.raise_for_status().json()["data"]]
        model = served[0]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ServerUnusable(f"{client.base_url} does not list its models ({error}); name a running server") from error
    for name, path in adapters.items():
        if name not in served:
            load = {"lora_name": name, "lora_path": str(path)}
            answer = await client.post("/v1/load_lora_adapter", json=load)
            if answer.status_code != 200:
                raise ServerUnusable(f"the server has no adapter {name!r} and does not load it: {answer.text[:300]}")
    return model


def at_once_of(requests: Sequence[BatchRequest]) -> int:
    """Return how many of a file's requests a server gets at once, if the file does not say."""
    return max(1, min(16, len(requests)))
