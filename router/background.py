"""Work beside everything else for as long as its process runs. An error is logged, and the work begins anew."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
"""The time between an error and the next attempt."""


async def keep_running(work: Callable[[], Coroutine[Any, Any, None]], pause_s: float | None = None) -> None:
    """Run ``work`` until it returns or this task is cancelled, again after every error."""
    while True:
        try:
            await work()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            logger.exception("a part of %s was cancelled; it begins anew", _name(work))
        except Exception:
            logger.exception("%s failed; it begins anew", _name(work))
        else:
            return
        await asyncio.sleep(PAUSE_S if pause_s is None else pause_s)


def run_in_background(work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
    """Start ``keep_running``; keep the task, and cancel it at the end."""
    return asyncio.get_running_loop().create_task(keep_running(work))


def _name(work: Callable[..., Any]) -> str:
    return getattr(getattr(work, "func", work), "__qualname__", repr(work))
