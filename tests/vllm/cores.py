"""vLLM's cores of tests, forked from a process that has imported vLLM: that takes most of a start.

Cores of served tests, of `benchmarks` and of vLLM's V2 runner start as everywhere else.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest
import setproctitle

PRELOADED = [
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "vllm.lora.worker_manager",
    "serve_app.engine.vllm.executor",
    "serve_app.engine.vllm.sampling.processor",
    "serve_app.engine.vllm.scheduling.scheduler",
    "serve_app.engine.vllm.transfer.connector",
]


class CoreContext(ForkServerContext):
    """Starts processes with the environment of this moment, as ``spawn`` does; the server has that of its start."""

    def Process(self, *, target: Callable[..., None], kwargs: Mapping[str, Any], **more: Any) -> Any:
        """Return a process of vLLM's."""
        return super().Process(target=_run, args=(dict(os.environ), target, kwargs), **more)


def _run(environment: Mapping[str, str], target: Callable[..., None], kwargs: Mapping[str, Any]) -> None:
    setproctitle.getproctitle()  # it finds its place in memory by the environment, which changes now
    os.environ.clear()
    os.environ.update(environment)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # of a core's ranks: vLLM's default, but not on CPUs
    target(**kwargs)


@contextmanager
def forked_cores() -> Iterator[None]:
    """Let vLLM in this process fork its cores."""
    context = CoreContext()
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.v1.engine.utils.get_mp_context", lambda: context)
        yield
