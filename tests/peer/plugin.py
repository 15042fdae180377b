"""A pytest plugin that runs vLLM's own server tests against this server. (`make test-peer`)

Where vLLM's tests start `vllm serve`, a warmpath instance starts with the same settings, and tests with the same
settings share it. Only tests that use a server run. `expected.yaml` has the failures that are expected, with reasons.
"""

import fnmatch
import inspect
import json
import os
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.common.server import instance

REPO = Path(__file__).parents[2]
WRITTEN = ("/completion/", "/test_chat.py", "/test_chunked_prompt.py", "/test_models.py", "/test_return_tokens_as")
"""The tests that want many different words: they get SmolLM2, the others the trained model."""
SERVER = "RemoteOpenAIServer"
SETTINGS = {
    "--max-model-len": "max_model_len",
    "--max_model_len": "max_model_len",
    "--served-model-name": "served_model_name",
    "--chat-template": "chat_template",
    "--reasoning-parser": "reasoning_parser",
    "--tool-call-parser": "tool_parser",
}
"""vLLM's flags that are settings here."""
HERE = {
    "--attention-backend", "--dtype", "--enable-auto-tool-choice", "--enable-chunked-prefill", "--enable-lora",
    "--enable-per-request-metrics", "--enable-prefix-caching", "--enable-prompt-tokens-details", "--enforce-eager",
    "--gpu-memory-utilization", "--max-cpu-loras", "--max-logprobs", "--max-lora-rank", "--max-num-batched-tokens",
    "--max-num-seqs", "--no-async-scheduling", "--no-enable-prefix-caching", "--seed",
    "--structured-outputs-config.backend", "--trust-remote-code",
}  # fmt: skip
"""vLLM's flags whose effect is always on here, or changes only speed and memory."""

_running: list[tuple[tuple[str, ...], str, ExitStack]] = []
"""At most two instances, by their arguments; some modules have two."""
_reached: set[str] = set()
_outcomes: dict[str, tuple[str, str]] = {}
_current = ""


def arguments_of(model: str, flags: list[str]) -> tuple[str, ...]:
    """Return the arguments of `warmpath serve` for those of `vllm serve`; raises ValueError for an unknown flag."""
    settings = {"served_model_name": model, "reasoning_parser": "none"}  # vLLM's default
    rest = [part for flag in flags for part in (flag.split("=", 1) if flag.startswith("--") else [flag])]
    while rest:
        flag = rest.pop(0)
        value = rest.pop(0) if rest and not rest[0].startswith("--") else ""
        if flag in SETTINGS:
            settings[SETTINGS[flag]] = value
        elif flag == "--lora-modules":
            name, _, path = value.partition("=")
            settings["lora_adapters"] = json.dumps({name: path})
        elif flag not in HERE:
            raise ValueError(f"this server has no {flag} {value}".strip())
    given = {"replicas": "1", "kv_cache_bytes": "512MiB", "dtype": "float32", "max_model_len": "8192", **settings}
    checkpoint = "PEER_WRITER" if any(part in _current for part in WRITTEN) else "PEER_TALKER"
    return ("--model", os.environ[checkpoint], *(f"--set={name}={value}" for name, value in sorted(given.items())))


def _url_of(arguments: tuple[str, ...]) -> str:
    """Return the URL of an instance with these arguments, started if needed in place of the oldest one."""
    for known, url, _ in _running:
        if known == arguments:
            return url
    if len(_running) == 2:
        _running.pop(0)[2].close()
    stack = ExitStack()
    url = stack.enter_context(instance(*arguments, env={"PYTHONPATH": str(REPO)}))
    _running.append((arguments, url, stack))
    return url


def _server_class() -> type[Any]:
    """Return a class that takes the place of vLLM's, with its clients and addresses."""
    import tests.utils as theirs

    class Running(theirs.RemoteVLLMServer):  # type: ignore[misc]
        """A running instance of this server."""

        def __init__(self, model: str, vllm_serve_args: list[str], **_: Any) -> None:
            arguments = arguments_of(model, [str(each) for each in vllm_serve_args])
            self.uds = None
            self.host, self.port = _url_of(arguments).removeprefix("http://").split(":")

        def __exit__(self, *_: object) -> None:
            """It goes on running, perhaps for the next module."""

        def url_for(self, *parts: str) -> str:
            _reached.add(_current)
            found: str = super().url_for(*parts)
            return found

    return Running


def pytest_configure(config: pytest.Config) -> None:
    """Put the class in its place before vLLM's test modules are imported."""
    import tests.utils as theirs

    theirs.RemoteOpenAIServer = _server_class()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that use a server."""
    kept = [item for item in items if _uses_server(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that cannot be imported."""
    if report.failed:
        _outcomes[report.nodeid] = ("failed", str(report.longrepr).strip().split("\n")[-1][:160])


def _uses_server(item: Any) -> bool:
    sources = [item.function]
    for name in item.fixturenames:
        sources += [each.func for each in item._fixtureinfo.name2fixturedefs.get(name, ())]
    return any(SERVER + "(" in inspect.getsource(each) for each in sources)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note whose requests follow."""
    global _current
    _current = item.nodeid


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    """Note each test's outcome: the first phase that did not pass, else passed."""
    report = (yield).get_result()
    if report.when == "call" or not report.passed:
        said = str(call.excinfo.value) if call.excinfo else ""
        before = _outcomes.get(item.nodeid)
        if before is None or before[0] == "passed":
            _outcomes[item.nodeid] = (report.outcome, said.strip().split("\n")[0][:160])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Compare the outcomes with the expected failures; only a new failure fails the run."""
    for _, _, stack in _running:
        stack.close()
    expected: dict[str, str] = {}
    for row in yaml.safe_load((Path(__file__).parent / "expected.yaml").read_text()) or []:
        expected |= dict.fromkeys(row["tests"], row["reason"])
    counts, lines = Counter[str](), []
    for nodeid, (outcome, said) in _outcomes.items():
        name = nodeid.removeprefix("tests/entrypoints/")
        reason = next((why for pattern, why in expected.items() if fnmatch.fnmatchcase(name, pattern)), "")
        kind = outcome if outcome != "failed" else "expected" if reason else "new failure"
        counts[kind] += 1
        if kind == "new failure":
            lines.append(f"NEW FAILURE {name}: {said}")
        elif kind == "passed" and reason:
            lines.append(f"PASSES, no longer expected to fail: {name} ({reason})")
    lines.append(f"vLLM's server tests: {dict(counts)} of {len(_outcomes)}; {len(_reached)} reached the server")
    print("\n" + "\n".join(lines), file=sys.__stdout__, flush=True)
    if os.environ.get("PEER_REPORT"):
        Path(os.environ["PEER_REPORT"]).write_text(yaml.safe_dump({k: list(v) for k, v in _outcomes.items()}))
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.exitstatus = 1 if counts["new failure"] or not counts["passed"] else 0
