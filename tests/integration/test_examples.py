"""The scripts in examples/, run as their first lines explain; the others run in tests/ray_llm and tests/vllm."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.server import instance
from serve_app.checkpoints.sources import resolve_model
from tests.integration.conftest import alone
from tests.serve_app.tokenization.variants import variant_of

pytestmark = [pytest.mark.integration, pytest.mark.long]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TEMPLATE = ROOT / "tests/serve_app/tool_templates/hermes.jinja"
"""SmolLM2's own template has no tools."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = variant_of(resolve_model("smollm2"), tmp_path_factory.mktemp("model") / "smollm2")
    shutil.copy(TEMPLATE, model / "chat_template.jinja")
    flags = ["--config", str(EXAMPLES / "tenants.yaml"), "--replicas", "1", "--max-model-len", "4096"]
    with alone(instance(str(model), *flags)) as url:
        yield url


def run(url: str, script: str, *arguments: str) -> str:
    """Run a script as a user does; return its output."""
    env = {**os.environ, "WARMPATH_URL": url, "WARMPATH_API_KEY": "acme-key"}
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def cached(printed: str) -> list[int]:
    """Return the cached tokens of each answer."""
    return [int(number) for number in re.findall(r"(\d+) of \d+ tokens", printed)]


def test_tenants_find_their_own_cache(url: str) -> None:
    first, again, other = cached(run(url, "chat_with_tenants.py"))
    assert first == 0 and again > 200
    assert other == 0


def test_documents_come_after_a_public_prompt(url: str) -> None:
    [first] = cached(run(url, "rag.py", "What happens when a replica dies?"))
    [again] = cached(run(url, "rag.py", "What happens when a replica dies?"))
    assert again > first + 200


def test_an_agents_turns_are_cached(url: str) -> None:
    """It calls a tool of its own and continues with the result."""
    printed = run(url, "agent.py", "What is 17 times 23?")
    assert re.search(r"(multiply|today)\(.*\) = ", printed, re.DOTALL), printed
    assert cached(printed)[1] > 100


def test_examples_are_short() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if len(path.read_text().splitlines()) >= 60} == set()
