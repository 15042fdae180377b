"""A client of OpenAI's streamed answers, of any server, that takes their times."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One streamed answer; times since the request was sent. ``reports_cached``: the server reported cached tokens."""

    ttft_s: float
    total_s: float
    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reports_cached: bool = True

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.total_s - self.ttft_s) / max(1, self.completion_tokens - 1)


class RequestFailed(Exception):
    """The server refused the request or broke off the answer; holds status and body."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:300]}")
        self.status = status


class StreamCut(RequestFailed):
    """A stream began, but broke off or ended with an error."""


def chat_body(model: str, max_tokens: int, user: str, system: str | None = None) -> dict[str, Any]:
    """Return a greedy chat request with one question, after an optional system prompt."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": user})
    return {"model": model, "temperature": 0, "max_tokens": max_tokens, "messages": messages}


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    # httpx's own line iterator also breaks at characters that JSON may contain, such as U+2028.
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode().rstrip("\r")
    if rest:
        yield rest.decode()


def _status_of(error: Any) -> int:
    """Return the status that an error event would have had as an answer of its own."""
    kind, code = (error.get("type"), error.get("code")) if isinstance(error, dict) else (None, None)
    if kind == "server_error" and code not in ("generation_failed", "timeout"):
        return 503
    return {"rate_limit_error": 429, "invalid_request_error": 400}.get(str(kind), 500)


async def stream_events(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a request. Raises RequestFailed for a refusal, StreamCut for an error or an early end."""
    async with client.stream("POST", url, json=body, headers=headers) as response:
        if response.status_code != 200:
            raise RequestFailed(response.status_code, (await response.aread()).decode())
        done = False
        async for line in _lines(response):
            data = line[5:].strip() if line.startswith("data:") else ""
            if data == "[DONE]":
                done = True
            elif data:
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    # After a wait, a refusal is an event.
                    raise StreamCut(_status_of(event["error"]), data)
                yield event
    if not done:
        raise StreamCut(500, "the stream ended early")


async def stream_chat(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> TimedAnswer:
    """Send one streamed chat completion. Raises RequestFailed on any error."""
    return await stream_answer(client, f"{url}/v1/chat/completions", body)


async def stream_answer(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> TimedAnswer:
    """Send one streamed completion; without usage, chunks count as tokens. Raises RequestFailed on any error."""
    payload = {**body, "stream": True, "stream_options": {"include_usage": True}}
    started_s = time.perf_counter()
    first_s: float | None = None
    parts: list[str] = []
    usage: dict[str, Any] = {}
    async for event in stream_events(client, url, payload, headers):
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            content = delta.get("content") if delta else choice.get("text")
            # A first token with half a character has no text: then the end is the first sign of it.
            if first_s is None and (content or delta.get("reasoning_content") or choice.get("finish_reason")):
                first_s = time.perf_counter()
            if content:
                parts.append(content)
        usage = event.get("usage") or usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    ended_s = time.perf_counter()
    return TimedAnswer(
        ttft_s=(first_s or ended_s) - started_s,
        total_s=ended_s - started_s,
        text="".join(parts),
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=cached or 0,
        completion_tokens=usage.get("completion_tokens", len(parts)),
        reports_cached=cached is not None,
    )
