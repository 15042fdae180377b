"""Fixtures for every test."""

import fcntl
import functools
import gc
import logging
import os
import shutil
import signal
import ssl
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest

from serve_app.checkpoints.demo_model import ensure_demo_model
from tests.harness.examples import share_examples

SHARED = ("tests/integration/demo/", "tests/integration/faults/", "tests/integration/scaling/")
"""The test files of each of these folders share instances."""

# A shell makes its background jobs ignore SIGINT, and processes that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test measures time: on a busy machine an example may be slow.
hypothesis.settings.register_profile("warmpath", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("warmpath")

# On a busy machine an answer may take longer than the five seconds of httpx.
for part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, part, 60.0)

# Each client of httpx and its kin would read all certificates, though tests ask plain HTTP alone.
ssl.create_default_context = functools.cache(ssl.create_default_context)

for chatty in ("httpx", "httpcore", "openai", "asyncio", "ray", "urllib3"):
    logging.getLogger(chatty).setLevel(logging.WARNING)


@pytest.hookimpl(optionalhook=True)  # `make test-gpu` needs no xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute the suite over workers (`make test` has three)."""
    from xdist.scheduler import LoadFileScheduling

    class Workers(LoadFileScheduling):
        """Gives each file to one worker, for its fixtures, and a folder that shares instances to one worker as well."""

        def _split_scope(self, nodeid: str) -> str:
            shared = next((folder for folder in SHARED if nodeid.startswith(folder)), None)
            return shared or super()._split_scope(nodeid)

    return Workers(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Nothing that collecting makes is garbage, and what it made is not looked through again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    share_examples(items)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """One worker at a time imports a test file, so that the others find its rewritten assertions in Python's cache."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None or sys.dont_write_bytecode or not isinstance(collector, pytest.Module):
        return (yield)
    with Path(tempfile.gettempdir(), f"warmpath-collection-{run}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes started by tests keep their secret and stored responses outside the user's state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def demo_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in ``demo`` checkpoint, built once for all workers outside the user's cache."""
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent
    return ensure_demo_model("demo", folder / "built-in-models")


@pytest.fixture(scope="session")
def tiny_model_path(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-style checkpoint of random weights, as saved by transformers, with the demo model's tokenizer."""
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM  # slow to import, and few tests need it

    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    config = LlamaConfig(
        vocab_size=AutoConfig.from_pretrained(demo_model_path).vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    for file in demo_model_path.iterdir():
        if "token" in file.name or file.name == "chat_template.jinja":
            shutil.copy(file, path)
    return path
