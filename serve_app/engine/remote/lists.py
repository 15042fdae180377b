"""The workers that the settings list now. An entry, or a line of a file, that cannot be read costs itself alone."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from serve_app.config.workers import LISTS, Worker, listed

logger = logging.getLogger(__name__)

LIST_S = 2.0
"""How long a look waits for lists; what it knew of a slower one holds, and its answer counts once it comes."""

_READERS = 8
"""Lists that may hang at once, such as an unanswered question to the DNS."""

ReadEntries = Callable[[Sequence[str], Callable[[str], None]], Sequence[Worker]]
"""Returns the workers of entries; calls its second argument with a sentence for each line that it skips."""


class WorkerLists:
    """Each entry's workers, as last read. Used from one loop."""

    def __init__(self, read: ReadEntries = listed) -> None:
        self._read = read
        self._threads = ThreadPoolExecutor(_READERS, "worker-lists")
        self._listed: dict[str, Sequence[Worker]] = {}
        self._reading: dict[str, asyncio.Future[Sequence[Worker]]] = {}
        self._said: dict[str, None] = {}

    async def now(self, entries: Sequence[str]) -> list[Worker]:
        """Return all entries' workers, each once. Waits at most ``LIST_S``."""
        loop = asyncio.get_running_loop()
        self._listed = {entry: self._listed.get(entry, ()) for entry in entries}
        for entry in entries:
            if not entry.startswith(LISTS):
                self._take(entry, lambda entry=entry: self._read([entry], self._say))  # type: ignore[misc]
            elif entry not in self._reading:
                self._reading[entry] = loop.run_in_executor(self._threads, self._read, [entry], self._say)
        if self._reading:
            await asyncio.wait(self._reading.values(), timeout=LIST_S)
        for entry, reading in list(self._reading.items()):
            if reading.done():
                del self._reading[entry]
                self._take(entry, reading.result)
        workers: dict[str, Worker] = {}
        for worker in chain.from_iterable(self._listed.values()):
            workers.setdefault(worker.url, worker)
        return list(workers.values())

    def close(self) -> None:
        """ReadEntries nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _take(self, entry: str, result: Callable[[], Sequence[Worker]]) -> None:
        try:
            workers = result()
        except (OSError, ValueError) as error:  # what was known still holds
            self._say(f"{entry} cannot be read: {error}")
        else:
            if entry in self._listed:
                self._listed[entry] = workers

    def _say(self, sentence: str) -> None:
        """Warn once of each mistake, as lists are read every second."""
        if sentence not in self._said:
            self._said[sentence] = None
            logger.warning("the list of workers: %s", sentence)
            if len(self._said) > 1000:
                self._said.pop(next(iter(self._said)))
