"""Records what an instance tells of itself while a benchmark runs: the events of /v1/cache/events, one a line.

The page at / plays such a file. A client like any other: what its key may not see is not in the file.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.common.report import BenchmarkError

EVENTS = "/v1/cache/events"
KEY_VARIABLE = "WARMPATH_OPERATOR_KEY"
MAX_BYTES = 64 << 20
"""What the page reads of a file."""
_SILENT_S, _AGAIN_S = 30.0, 1.0
_DATA = b"data: "


def beside(path: Path | None, name: str, names: int) -> Path | None:
    """Return where one of several runs is recorded: ``path`` itself where there is one."""
    return path if path is None or names == 1 else path.with_name(f"{path.stem}.{name}{path.suffix}")


@contextmanager
def recorded(url: str, path: Path | None, key: str = "") -> Iterator[None]:
    """Write the events of the instance at ``url`` to ``path`` meanwhile; do nothing without one.

    ``key``: an operator's, for all of them. A stream that breaks is taken up again. Raises BenchmarkError where there
    is none.
    """
    if path is None:
        yield
        return
    headers = {"authorization": f"Bearer {key}"} if key else {}
    snapshot = httpx.get(f"{url}{EVENTS}", params={"once": "true"}, headers=headers, timeout=_SILENT_S)
    if snapshot.status_code != 200:
        raise BenchmarkError(f"{url}{EVENTS} answered {snapshot.status_code}, so nothing can be recorded.")
    path.parent.mkdir(parents=True, exist_ok=True)
    over = threading.Event()
    thread = threading.Thread(target=_record, args=(url, path, headers, over), name="recorder", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * _SILENT_S)


def _record(url: str, path: Path, headers: dict[str, str], over: threading.Event) -> None:
    events = size = 0
    with path.open("wb", buffering=0) as file, httpx.Client(timeout=_SILENT_S) as client:
        while not over.is_set() and size < MAX_BYTES:
            try:
                for data in _events(client, url, headers, over):
                    size += len(data) + 1
                    if size >= MAX_BYTES:
                        break
                    file.write(data + b"\n")
                    events += 1
            except httpx.HTTPError:  # the ingress is being replaced
                pass
            over.wait(_AGAIN_S)
    whole = "" if size < MAX_BYTES else f", and no more: the page reads {MAX_BYTES >> 20} MiB"
    print(f"recorded {events} events in {path}{whole}", file=sys.stderr)


def _events(client: httpx.Client, url: str, headers: dict[str, str], over: threading.Event) -> Iterator[bytes]:
    """Yield the JSON of each event until the stream ends, or it is over."""
    rest = b""
    with client.stream("GET", f"{url}{EVENTS}", headers=headers) as response:
        if response.status_code != 200:
            return
        for part in response.iter_bytes():  # comments come every few seconds, so that the end is seen
            *lines, rest = (rest + part).split(b"\n")
            yield from (line.removeprefix(_DATA) for line in lines if line.startswith(_DATA))
            if over.is_set():
                return
