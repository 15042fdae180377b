"""Killing the holder during a pull costs time, and nothing else; replicas leave the processor to ingresses."""

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest

from benchmarks.common.prompts import text_of
from serve_app.checkpoints.sources import resolve_model
from serve_app.replica.replica import BEHIND_INGRESSES
from tests.integration.conftest import eventually, metric, wait_for_replicas
from tests.integration.demo.conftest import Served

pytestmark = pytest.mark.integration

PREFIX_TOKENS = 6000
MOST_QUESTIONS = 60


def test_a_killed_holder_costs_time_only(served: Served) -> None:
    """SIGKILL while the other replica waits for its blocks: every request gets its undisturbed answer.

    docs: routing
    """
    model = resolve_model("demo")
    system = "system", text_of(PREFIX_TOKENS, model, 2)
    operator = served.headers("operator")

    def pulls(outcome: str) -> float:
        """Return the number of pulls that ended that way."""
        return metric(served.url, "warmpath_kv_pulls_total", f'outcome="{outcome}"', operator)

    def begun() -> float:
        return metric(served.url, "warmpath_kv_pulls_begun_total", headers=operator)

    def blocks() -> dict[str, int]:
        return {name: replica["blocks"].get("pool", 0) for name, replica in served.replicas().items()}

    def question(number: int) -> tuple[str, str]:
        return "user", text_of(600, model, 200 + number)

    wait_for_replicas(served.url, 2, (), operator)
    before = blocks()
    served.chat("acme", system, ("user", "first"))
    served.wait_until_held("acme", PREFIX_TOKENS - 16, system, ("user", "first"))
    after = blocks()
    holder = max(before, key=lambda name: after[name] - before[name])
    pid, count = int(served.replicas()[holder]["pid"]), begun()
    pending: list[Future[tuple[int, int, str]]] = []
    with ThreadPoolExecutor(MOST_QUESTIONS) as pool:
        os.kill(pid, signal.SIGSTOP)  # it answers nothing and hands nothing over, so its queue only grows

        def begins() -> bool:
            """Ask once more, until a pull has begun."""
            if len(pending) < MOST_QUESTIONS:
                pending.append(pool.submit(served.chat, "acme", system, question(len(pending))))
            return begun() > count

        try:
            eventually(begins)
        finally:
            os.kill(pid, signal.SIGKILL)
        answers = [task.result() for task in pending]
    eventually(lambda: pulls("holder_lost") + pulls("late") > 0)
    computed = served.chat("acme", system, question(len(pending) - 1), cache_salt="alone")
    assert computed[2] == answers[-1][2]
    wait_for_replicas(served.url, 2, [holder], operator)


def test_replicas_without_a_gpu_come_behind_ingresses(served: Served) -> None:
    """Where both want the same processor, who answers comes before who computes, so /health waits for no prompt."""

    def all_run() -> bool:
        return all(psutil.pid_exists(int(replica["pid"])) for replica in served.replicas().values())

    eventually(all_run)  # a killed one may still be listed
    replicas = [psutil.Process(int(replica["pid"])) for replica in served.replicas().values()]
    parent = replicas[0].parent()
    assert parent is not None
    ingresses = [worker for worker in parent.children() if "Ingress" in " ".join(worker.cmdline())]
    (niceness,) = set(map(nicest_thread, ingresses))
    assert set(map(nicest_thread, replicas)) == {min(19, niceness + BEHIND_INGRESSES)}


def nicest_thread(process: psutil.Process) -> int:
    """Return the niceness of the threads that work; Ray's own keep a lower one."""
    return max(os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads())
