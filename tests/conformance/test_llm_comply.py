"""The checks of `llm-comply`, which others run too, against a real instance: `make test-conformance`. (docs: api)

Its formats are Open Responses, chat completions and messages. `llm_comply.yaml` has the checks that fail on purpose.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.common.server import instance
from tests.clients.model import pieces, trained
from tests.integration.conftest import PATIENCE_S, alone

MODEL = "gpt-5-and-claude-sonnet-4"
"""A name by which no check is skipped: those of reasoning want one of these models."""
COUNTS = {"open-responses": 13, "openai-chat": 9, "anthropic": 9}
"""The checks of each format."""
HEADERS = {"anthropic": ("--auth-header", "x-api-key", "--no-bearer", "--header", "anthropic-version:2023-06-01")}
EXPECTED = {
    check: row["reason"]
    for row in yaml.safe_load(Path(__file__).with_name("llm_comply.yaml").read_text())
    for check in row["checks"]
}

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(600)]


@dataclass(frozen=True, slots=True)
class Talk:
    """Answers that end, each to the mark in the same place of ``marks``."""

    marks: list[str]
    texts: tuple[str, ...]

    @property
    def answers(self) -> list[list[str]]:
        """The texts, split into pieces."""
        return [pieces(text) for text in self.texts]


TALK = Talk(
    ["<|im_start|>", "San Francisco"],
    (
        "Hello there, friend. One, two, three, four, five.",
        '[{"name": "get_weather", "parameters": {"location": "San Francisco"}}]',
    ),
)


@pytest.fixture(scope="module")
def url(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A replica of a model whose answers end."""
    path = trained([TALK], demo_model_path, tmp_path_factory.mktemp("trained") / "talker")
    settings = ("dtype=float32", "kv_cache_bytes=134217728", f"served_model_name={MODEL}", "replicas=1")
    with alone(instance("--model", str(path), *(f"--set={setting}" for setting in settings))) as base:
        yield base


@pytest.mark.parametrize("form", COUNTS)
def test_all_checks_pass_but_those_that_fail_on_purpose(form: str, url: str) -> None:
    """A check that fails, or that no longer does, has to be listed, or not; none is skipped."""
    done = subprocess.run(
        [sys.executable, "-m", "llm_comply.cli", "--format", form, "--base-url", f"{url}/v1", "--api-key", "none",
         "--model", MODEL, "--json", "--timeout", str(PATIENCE_S), *HEADERS.get(form, ())],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 5,
    )  # fmt: skip
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    for each in results:
        print(
            each["id"], each["status"], *each.get("errors", ()), *each.get("warnings", ()), EXPECTED.get(each["id"], "")
        )
    failed = {each["id"]: each.get("errors") for each in results if each["status"] != "passed"}
    wanted = {each["id"] for each in results} & EXPECTED.keys()
    assert failed.keys() == wanted, failed
    assert len(results) == COUNTS[form]
