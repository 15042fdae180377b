"""Time that a test moves: a clock, and a loop in which waiting takes none, so that any machine can test time limits."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Clock:
    """Tells the seconds that a test sets."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class _Jumping(selectors.SelectSelector):
    """Advances the time instead of waiting. ``turn``: is called before each turn of the loop."""

    def __init__(self, turn: Callable[[], None]) -> None:
        super().__init__()
        self.now_s = 0.0
        self._turn = turn

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turn()
        assert timeout is not None, "everything waits, and no timer ends it"
        self.now_s += timeout
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its time advances only when all tasks wait for timers. Work for threads is done at once."""

    def __init__(self, turn: Callable[[], None] = lambda: None) -> None:
        self._jumping = _Jumping(turn)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_at_once(script: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, as ``asyncio.run`` does."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(script)


async def passes(seconds: float) -> None:
    """Let virtual time pass, and all that happens in it."""
    assert isinstance(asyncio.get_running_loop(), VirtualTimeLoop), "this would wait"
    await asyncio.sleep(seconds)
