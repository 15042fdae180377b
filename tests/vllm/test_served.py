"""`warmpath serve --engine vllm`: the whole path over HTTP."""

from collections.abc import Iterator
from contextlib import suppress

import httpx
import psutil
import pytest

from benchmarks.common.server import instance
from tests.integration.conftest import PATIENCE_S, eventually, replicas_of

START_S = 500


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One replica of the demo model in float32."""
    settings = ("dtype=float32", "replicas=1", "kv_cache_bytes=134217728", "enforce_eager=true", "max_model_len=2048")
    with instance("--model", "demo", "--engine", "vllm", *(f"--set={setting}" for setting in settings)) as base:
        yield base


def ended(process: psutil.Process) -> bool:
    """Return whether it has ended; a process that its parent has not waited for yet has ended too."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_core(process: psutil.Process) -> bool:
    """Return whether it is vLLM's core; where a core changes the first of its variables, it keeps its first title."""
    return process.name().startswith("VLLM") or "spawn_main" in " ".join(process.cmdline())


@pytest.mark.parametrize("victim", ["core", "replica"])
def test_a_killed_core_is_replaced_and_leaves_no_process(url: str, victim: str) -> None:
    """A replica with a dead core is found by its health check; a replica's core ends with it."""
    found: list[tuple[str, psutil.Process, psutil.Process]] = []

    def with_core() -> bool:  # on a busy machine Serve may be replacing the one of the test before
        with suppress(psutil.NoSuchProcess, KeyError):  # it has ended, or has not reported
            for name, replica in replicas_of(url).items():
                whole = psutil.Process(int(replica["pid"]))
                cores = [child for child in whole.children(recursive=True) if is_core(child)]
                found.extend((name, whole, core) for core in cores)
        return bool(found)

    eventually(with_core, START_S)
    ((before, whole, core),) = found
    (whole if victim == "replica" else core).kill()
    eventually(lambda: ended(whole) and ended(core), START_S)

    def replaced() -> bool:
        replicas = replicas_of(url)
        return len(replicas) == 1 and before not in replicas and all("pid" in each for each in replicas.values())

    eventually(replaced, START_S)
    choices = {"choice": ["port", "starboard"]}
    body = {"model": "demo", "messages": [{"role": "user", "content": "Which side?"}], "structured_outputs": choices}
    answers: list[httpx.Response] = []

    def answered() -> bool:
        answers.append(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S))
        return answers[-1].status_code == 200

    eventually(answered)
    assert answers[-1].json()["choices"][0]["message"]["content"] in choices["choice"]
    assert 'engine="vllm"' in httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
