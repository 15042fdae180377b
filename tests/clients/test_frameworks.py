"""Client packages run against a real instance: a loop of tool calls, and structured answers. (docs: agents)

They run if WARMPATH_UV names the command `uv`, which keeps each program's packages in an environment of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.server import instance
from tests.clients.model import Errand, pieces, trained
from tests.integration.conftest import PATIENCE_S, alone, metric

FOLDER = Path(__file__).parent / "frameworks"
UV = os.environ.get("WARMPATH_UV", "")
MODEL = "errands"
CITIES = ("Oslo", "Bergen")
WRITES = ("write_note", {"text": "larch"})
SHOWS = ("show_note", {"capitals": True})

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not UV, reason="`make test-clients` installs the packages and runs this"),
]


@dataclass(frozen=True, slots=True)
class OtherErrand(Errand):
    """An errand whose answers have another form than calls and a last text."""

    texts: tuple[str, ...] = ()

    @property
    def answers(self) -> list[list[str]]:
        """The texts, split into pieces."""
        return [pieces(text) for text in self.texts]

    @property
    def marks(self) -> list[str]:
        """The results of the tools, since these packages rewrite calls."""
        return [self.word, f"kept-{self.word}", self.word.upper()]


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def react(**fields: str) -> str:
    """An answer in dspy's own form."""
    return "".join(f"[[ ## {name} ## ]]\n{text}\n\n" for name, text in fields.items()) + "[[ ## completed ## ]]"


COMMON = Errand("larch", WRITES, SHOWS)
ENDING = OtherErrand(
    "cedar", WRITES, SHOWS,
    (
        hermes("write_note", {"text": "cedar"}), hermes(*SHOWS),
        hermes("final_answer", {"answer": "It says CEDAR."}),
    ),
)  # fmt: skip
"""smolagents ends by a call."""
REACT = OtherErrand(
    "alder", WRITES, SHOWS,
    (
        react(next_thought="Write.", next_tool_name="write_note", next_tool_args='{"text": "alder"}'),
        react(next_thought="Show.", next_tool_name="show_note", next_tool_args='{"capitals": true}'),
        react(
            next_thought="Done.", next_tool_name="finish", next_tool_args="{}", reasoning="Done.",
            answer="The file says ALDER.",
        ),
    ),
)  # fmt: skip


PROGRAMS = {
    "openai_agents": COMMON,
    "pydanticai": COMMON,
    "instructor_": COMMON,
    "langchain_": COMMON,
    "llama_index_": COMMON,
    "litellm_proxy": COMMON,
    "smolagents_": ENDING,
    "dspy_": REACT,
}


@pytest.fixture(scope="module")
def url(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two replicas of the model that runs the errands."""
    path = trained([COMMON, ENDING, REACT], demo_model_path, tmp_path_factory.mktemp("trained") / MODEL)
    settings = ("dtype=float32", "kv_cache_bytes=134217728")
    with alone(instance("--model", str(path), *(f"--set={setting}" for setting in settings))) as base:
        yield base


def python_of(program: Path) -> str:
    """Install what a program needs, unless it is there, and return that environment's Python."""
    for command in (("sync", "--python", sys.executable), ("python", "find")):
        done = subprocess.run([UV, *command, "--script", program], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("program", "errand"), PROGRAMS.items(), ids=PROGRAMS)
def test_a_package_runs_its_tools_and_gets_structured_answers(
    program: str, errand: Errand, url: str, tmp_path: Path
) -> None:
    """Every loop calls both tools and ends with what the second one returned; every structured answer has its form."""
    python = python_of(FOLDER / f"{program}.py")
    before = metric(url, "warmpath_tenant_cached_prompt_tokens_total")
    done = subprocess.run(
        [python, FOLDER / f"{program}.py", url, MODEL, errand.asked],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C.UTF-8", "NO_PROXY": "*"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 5,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    reports = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    loops = [report for report in reports if report["answer"] is not None]
    assert loops
    for number, report in enumerate(loops, 1):
        assert report["called"] == ["write_note", "show_note"] * number
        assert errand.word.upper() in report["answer"]
    structured = [answer for report in reports for answer in report["structured"]]
    assert structured
    for answer in structured:
        assert answer["city"] in CITIES and isinstance(answer["done"], bool)
    assert metric(url, "warmpath_tenant_cached_prompt_tokens_total") > before
