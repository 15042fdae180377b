"""`--model NAMESPACE/NAME` against a hub endpoint on loopback, with the environment its users know."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
_RESOLVE = """
import sys
from serve_app.checkpoints.checkpoint import CheckpointError, load_checkpoint_info
from serve_app.checkpoints.sources.resolve import resolve_model
try:
    path = resolve_model(sys.argv[1], sys.argv[2] or None)
    load_checkpoint_info(path)
    print(path)
except CheckpointError as error:
    print("error:", error)
"""


class _Hub(BaseHTTPRequestHandler):
    """The routes that a snapshot needs. ``org/open`` is for all, ``org/closed`` for who has the token."""

    files: ClassVar[dict[str, bytes]] = {}
    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.requests.append(path)
        parts = path.removeprefix("/api/models").strip("/").split("/")
        model, rest = "/".join(parts[:2]), parts[2:]
        if model == "org/closed" and self.headers.get("authorization") != "Bearer hf_key":
            self._send(401, b"{}", body, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        elif model not in ("org/open", "org/closed"):
            self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
        elif rest[0] == "revision" and rest[1] not in COMMITS:
            self._send(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
        elif rest[0] == "revision":
            self._send(200, json.dumps({"id": model, "sha": COMMITS[rest[1]], "siblings": []}).encode(), body)
        elif rest[0] == "tree":
            found = [
                {"type": "file", "path": name, "size": len(data), "oid": sha1(data, usedforsecurity=False).hexdigest()}
                for name, data in self.files.items()
            ]
            self._send(200, json.dumps(found).encode(), body)
        else:
            data = self.files["/".join(rest[2:])]
            etag = sha1(data, usedforsecurity=False).hexdigest()
            self._send(200, data, body, {"ETag": f'"{etag}"', "X-Repo-Commit": rest[1]})

    def _send(self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub(demo_model_path: Path) -> Iterator[ThreadingHTTPServer]:
    _Hub.files = {file.name: file.read_bytes() for file in demo_model_path.iterdir()}
    _Hub.files |= {"pytorch_model.bin": b"old", "consolidated.safetensors": b"theirs", "onnx/model.json": b"{}"}
    _Hub.requests.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_the_hub_as_its_users_know_it(hub: ThreadingHTTPServer, tmp_path: Path, demo_model_path: Path) -> None:
    """HF_HOME, revisions, HF_TOKEN and HF_HUB_OFFLINE; each refusal is one sentence that says what to do."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }

    def resolve(model: str, revision: str = "", **more: str) -> str:
        command = [sys.executable, "-c", _RESOLVE, model, revision]
        done = subprocess.run(command, env=env | more, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.strip()

    path = Path(resolve("org/open"))
    assert path == tmp_path.resolve() / "hub" / "models--org--open" / "snapshots" / COMMITS["main"]
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {
        file.name: file.read_bytes() for file in demo_model_path.iterdir()
    }
    assert Path(resolve("org/open", "v1")).name == COMMITS["v1"]
    assert "not revision v9" in resolve("org/open", "v9")
    assert "no model org/nothing" in resolve("org/nothing")
    assert "accept its terms" in resolve("org/closed") and "HF_TOKEN" in resolve("org/closed")
    assert Path(resolve("org/closed", HF_TOKEN="hf_key")).name == COMMITS["main"]

    _Hub.requests.clear()
    assert Path(resolve("org/open", HF_HUB_OFFLINE="1")) == path
    assert "not in the hub's cache" in resolve("org/other", HF_HUB_OFFLINE="1")
    assert _Hub.requests == []

    # A config alone is fetched without the weights.
    script = "from serve_app.checkpoints.sources.model_config import model_config; print(model_config('org/open'))"
    found = subprocess.run(
        [sys.executable, "-c", script], env=env | {"HF_HOME": str(tmp_path / "new")}, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    assert "hidden_size" in found.stdout
    assert [path for path in _Hub.requests if "safetensors" in path] == []
