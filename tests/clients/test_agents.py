"""Real agent packages run against a real instance: a prompt, calls of their own tools, an end. (docs: agents)

They run if WARMPATH_CLIENTS names the folder of their commands, such as `node_modules/.bin` after
`npm install @anthropic-ai/claude-code @openai/codex @qwen-code/qwen-code`.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.server import instance
from tests.clients.model import NOTE, Errand, trained
from tests.integration.conftest import PATIENCE_S, alone, metric

FOLDER = Path(os.environ.get("WARMPATH_CLIENTS", "/nowhere"))
HOW = "set WARMPATH_CLIENTS to the folder that has the command {}, which npm installs; see docs/tutorials/agents.md"
MODEL = "errands"
TOKENS = ("warmpath_tenant_prompt_tokens_total", "warmpath_tenant_cached_prompt_tokens_total")
SHOW = f"tr a-z A-Z < {NOTE}"

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent: its command line, its server settings, and the tool calls that the model makes in a folder."""

    command: str
    arguments: tuple[str, ...]
    environment: Callable[[str], dict[str, str]]
    errand: Callable[[Path], Errand]


def codex_home(url: str, home: Path) -> None:
    """Write Codex's configuration of the provider."""
    provider = {"name": "warmpath", "base_url": f"{url}/v1", "env_key": "API_KEY", "wire_api": "responses"}
    lines = [f'model = "{MODEL}"', 'model_provider = "here"', "[model_providers.here]"]
    (home / ".codex").mkdir()
    (home / ".codex/config.toml").write_text("\n".join([*lines, *(f'{k} = "{v}"' for k, v in provider.items())]))


AGENTS = {
    "claude": Agent(
        "claude",
        ("--output-format", "json", "--allowedTools", "Write,Bash", "-p"),
        lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        lambda folder: Errand(
            "juniper",
            ("Write", {"file_path": str(folder / NOTE), "content": "juniper"}),
            ("Bash", {"command": SHOW}),
        ),
    ),
    "codex": Agent(
        "codex",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        lambda url: {"API_KEY": "none"},
        lambda folder: Errand(
            "quartz", ("exec_command", {"cmd": f"printf quartz > {NOTE}"}), ("exec_command", {"cmd": SHOW})
        ),
    ),
    "qwen": Agent(
        "qwen",
        ("--auth-type", "openai", "--yolo", "-o", "json", "-p"),
        lambda url: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL},
        lambda folder: Errand(
            "saffron",
            ("write_file", {"file_path": str(folder / NOTE), "content": "saffron"}),
            ("run_shell_command", {"command": SHOW, "is_background": False}),
        ),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agents' working folder; the model has learned its name."""
    if not any((FOLDER / agent.command).exists() for agent in AGENTS.values()):
        pytest.skip(HOW.format(" or ".join(AGENTS)))
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def url(folder: Path, demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two replicas of the model that runs the errands."""
    errands = [agent.errand(folder) for agent in AGENTS.values()]
    path = trained(errands, demo_model_path, tmp_path_factory.mktemp("trained") / MODEL)
    settings = ("dtype=float32", "kv_cache_bytes=134217728")
    with alone(instance("--model", str(path), *(f"--set={setting}" for setting in settings))) as base:
        yield base


@pytest.mark.parametrize("kind", AGENTS)
def test_an_agent_runs_its_errand(kind: str, url: str, folder: Path, tmp_path: Path) -> None:
    """It writes a file, reads it, and ends; each turn reads its prefix from the earlier turns' cache."""
    agent = AGENTS[kind]
    errand = agent.errand(folder)
    if not (FOLDER / agent.command).exists():
        pytest.skip(HOW.format(agent.command))
    (folder / NOTE).unlink(missing_ok=True)
    codex_home(url, tmp_path)
    before = [metric(url, name) for name in TOKENS]
    done = subprocess.run(
        [FOLDER / agent.command, *agent.arguments, errand.asked],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C.UTF-8", **agent.environment(url)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 3,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (folder / NOTE).read_text() == errand.word
    assert errand.ends in done.stdout, done.stdout[-2000:]
    tokens, cached = (metric(url, name) - was for name, was in zip(TOKENS, before, strict=True))
    assert cached > 0.6 * tokens > 0  # the second and third of three prompts
    if kind == "claude":
        answer: dict[str, Any] = json.loads(done.stdout)
        assert (answer["num_turns"], answer["is_error"]) == (3, False)
