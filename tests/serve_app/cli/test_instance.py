"""A start of Ray that was too slow is repeated; a failed start is reported with its cause."""

import io
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from rich.console import Console

from serve_app.cli import instance, local_ray
from serve_app.cli.instance import failure
from serve_app.config.app import AppConfig
from serve_app.errors import innermost


def test_a_terminal_sees_for_how_long_a_step_takes_already() -> None:
    """A file gets one line, with the time that it took."""
    written = {terminal: io.StringIO() for terminal in (True, False)}
    for terminal, file in written.items():
        with instance._step(Console(file=file, force_terminal=terminal), "[2/4] Ray"):
            pass
    assert "0:00:00" in written[True].getvalue()
    assert written[False].getvalue().strip() == "[2/4] Ray: started in 0 s"


@pytest.mark.parametrize(
    ("message", "again"),
    [
        ("The current node timed out during startup. This could happen because", True),
        ("no such address", False),
        ("port 6379 is taken", False),
    ],
)
def test_only_a_node_that_was_too_slow_is_started_again(
    monkeypatch: pytest.MonkeyPatch, message: str, again: bool
) -> None:
    tries: list[dict[str, Any]] = []
    ended: list[int] = []

    def init(**options: Any) -> Any:
        tries.append(options)
        if len(tries) == 1:
            raise RuntimeError(message)
        assert ended, "the first try's processes still run"
        return SimpleNamespace(address_info={"session_dir": "/session"})

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(local_ray, "end_descendants", ended.append)
    said, logs = io.StringIO(), None
    with suppress(RuntimeError):
        logs = instance._start_ray(AppConfig(model="demo"), False, Console(file=said))
    assert logs == (Path("/session/logs/serve") if again else None)
    assert ("trying again" in said.getvalue()) == again
    assert len(tries) == 1 + again and tries[0] == tries[-1]


REPLICA = """A replica failed to start with exception. Retrying 5 more time(s). Error:
RuntimeError: Traceback (most recent call last):
  File "/ray/serve/_private/replica.py", line 1900, in initialize
OSError: [Errno 2] no such thing

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/serve_app/replica/replica.py", line 80, in __init__
serve_app.engine.protocol.AdapterError: the adapter 'a': layer 1 has rank 8, over max_lora_rank 4
"""


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (REPLICA, "the adapter 'a': layer 1 has rank 8, over max_lora_rank 4"),
        ("Traceback ...\nValueError: disk_cache_bytes needs disk_cache_dir\n", "disk_cache_bytes needs disk_cache_dir"),
        ("Traceback ...\ntorch.OutOfMemoryError: 2 GiB\n", "torch.OutOfMemoryError: 2 GiB"),
        ("MemoryError: all: gone\nsome more\n", "MemoryError: all: gone"),
        ("  nothing that looks like one  ", "nothing that looks like one"),
    ],
)
def test_the_innermost_sentence(message: str, sentence: str) -> None:
    """Warmpath's own errors stand alone; other errors keep their type."""
    assert innermost(message) == sentence


def test_the_first_failure_of_a_constructor_is_enough() -> None:
    """Serve would retry; the failure of an application is reported in any state of its deployments."""
    assert failure("DEPLOYING", {"Ingress": "", "Replica": ""}, "") is None
    assert failure("DEPLOYING", {"Ingress": "waits for resources"}, "") is None
    why = failure("DEPLOYING", {"Ingress": "", "Replica": REPLICA}, "")
    assert why == "Replica does not start: the adapter 'a': layer 1 has rank 8, over max_lora_rank 4"
    assert failure("DEPLOY_FAILED", {"Replica": "the actor died"}, "failed") == "the actor died"
    assert failure("DEPLOY_FAILED", {"Replica": ""}, "failed") == "failed"
