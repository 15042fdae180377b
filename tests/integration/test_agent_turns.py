"""Recorded loops of agents' clients over two real replicas: each turn finds what its client sent before."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.server import instance
from serve_app.tenants import Tenant
from tests.clients.turns import CLIENTS, Loop, RecordedRequest, preparer_of, recorded
from tests.integration.conftest import HTTP, alone
from tests.serve_app.tokenization.variants import variant_of
from tests.serve_app.tool_templates.families import TEMPLATES

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.fixture(scope="module")
def model(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a template for tools, whose tags are words of several tokens here."""
    path = variant_of(demo_model_path, tmp_path_factory.mktemp("turns") / "demo")
    shutil.copy(TEMPLATES / "hermes.jinja", path / "chat_template.jinja")
    return path


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    flags = ["--set=served_model_name=demo", "--set=dtype=float32", "--set=kv_cache_bytes=268435456"]
    with alone(instance("--model", str(model), "--replicas", "2", *flags)) as found:
        yield found


def cached_tokens(url: str, request: RecordedRequest) -> int:
    """Send a request for a short answer; return the tokens of its prompt that came from a cache."""
    most = "max_output_tokens" if request.path == "/v1/responses" else "max_tokens"
    body: dict[str, Any] = {**request.body, "stream": False, "stream_options": None, most: 4}
    usage = HTTP.post(url + request.path, json=body, headers=request.headers).raise_for_status().json()["usage"]
    if request.path == "/v1/messages":
        return int(usage["cache_read_input_tokens"])
    return int((usage.get("input_tokens_details") or usage["prompt_tokens_details"])["cached_tokens"])


@pytest.mark.parametrize("client", CLIENTS)
def test_each_turn_gets_what_its_client_sent_before(client: str, model: Path, url: str) -> None:
    """One client at a time: beside others, to compute again at once may pay more than to wait for the holder."""
    preparer, loop = preparer_of(model), Loop()
    for request in recorded(client):
        (made,) = asyncio.run(preparer.prepare(request.parsed(), Tenant("t"), "r"))
        loop.add(made.token_ids, cached_tokens(url, request))
    assert loop.share() >= 0.99, loop.short()
