"""A proxy on loopback that records what clients send: `python -m tests.clients.recorder http://HOST:PORT RECORD`."""

import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

_HOP = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}


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


def main() -> None:
    """Serve on port 8001."""
    url, file = sys.argv[1:]
    uvicorn.run(Recorder(url, Path(file)).application(), port=8001)


if __name__ == "__main__":
    main()
