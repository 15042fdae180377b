"""Of what Serve tells of a start that failed, the sentence that says why."""

from __future__ import annotations

import pytest

from serve_app.cli.start_failure import failure, innermost

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
    """Warmpath's own stand alone; others keep their kind."""
    assert innermost(message) == sentence


def test_the_first_failure_of_a_constructor_is_enough() -> None:
    """Serve would try again; and an application that gave up says so whatever its deployments do."""
    assert failure("DEPLOYING", {"Ingress": "", "Replica": ""}, "") is None
    assert failure("DEPLOYING", {"Ingress": "waits for resources"}, "") is None
    why = failure("DEPLOYING", {"Ingress": "", "Replica": REPLICA}, "")
    assert why == "Replica does not start: the adapter 'a': layer 1 has rank 8, over max_lora_rank 4"
    assert failure("DEPLOY_FAILED", {"Replica": "the actor died"}, "failed") == "the actor died"
    assert failure("DEPLOY_FAILED", {"Replica": ""}, "failed") == "failed"
