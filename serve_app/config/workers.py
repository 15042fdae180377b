"""The servers behind ``engine: remote``: their addresses, and where they are listed."""

import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from urllib.parse import parse_qs, urlsplit

FILE, DNS = "file:", "dns+"
"""What an entry begins with that names a file of entries, or a host whose every address is a worker."""

LISTS = (FILE, DNS)

MAX_LIST_CHARS = 1 << 20
"""Of a file of entries."""

EVENTS_PORT, REPLAY_PORT = 5557, 5558
"""vLLM's default port of KV events, and the one after it for batches that are sent again."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A server. ``url``: its name, without a path; ``events``, ``replay``: ZeroMQ addresses of its KV events."""

    url: str
    events: str
    replay: str


def worker_of(entry: str) -> Worker:
    """Return the worker of a URL such as `http://a:8000?events=5557&replay=5558`. Raises ValueError."""
    parts = urlsplit(entry.strip())
    wrong = (
        f"{entry!r} is no worker: write http://HOST:PORT, with ?events=PORT&replay=PORT if its KV events have others"
    )
    try:
        ports = {
            name: int(values[-1]) for name, values in parse_qs(parts.query, strict_parsing=bool(parts.query)).items()
        }
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise ValueError(wrong) from None
    usual = parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/", "/v1", "/v1/")
    if not usual or parts.username or parts.fragment or not ports.keys() <= {"events", "replay"}:
        raise ValueError(wrong)
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else str(parts.hostname)
    events, replay = ports.get("events", EVENTS_PORT), ports.get("replay", REPLAY_PORT)
    return Worker(
        f"{parts.scheme}://{host}:{port}", f"tcp://{host}:{events}", f"tcp://{host}:{replay}" if replay else ""
    )


def check_entry(entry: str) -> None:
    """Raise ValueError for an entry of ``workers`` that can name no worker."""
    if not entry.startswith(FILE):
        worker_of(entry.removeprefix(DNS))


def listed(entries: Iterable[str], skip: Callable[[str], None] | None = None) -> list[Worker]:
    """Return the workers that entries name now, each once; reads files and asks the DNS, so it may wait.

    ``skip``: called with a sentence for each line of a file that is no worker; without it such a line is an error, too.
    Raises OSError or ValueError if a list cannot be read: what it said before then still holds.
    """
    workers: dict[str, Worker] = {}
    for entry in entries:
        for worker in _of_entry(entry, skip):
            workers.setdefault(worker.url, worker)
    return list(workers.values())


def _lines(path: Path) -> list[str]:
    """Return a file's entries. Raises OSError, and ValueError for what is no list."""
    if not S_ISREG(path.stat().st_mode):  # reading a pipe may wait for ever
        raise ValueError(f"{path} is no file")
    with path.open(encoding="utf-8") as file:
        text = file.read(MAX_LIST_CHARS + 1)
    if len(text) > MAX_LIST_CHARS:
        raise ValueError(f"{path} has more than {MAX_LIST_CHARS:,} characters")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(FILE)]


def _of_entry(entry: str, skip: Callable[[str], None] | None) -> Sequence[Worker]:
    if entry.startswith(FILE):
        path = Path(entry.removeprefix(FILE).removeprefix("//")).expanduser()
        workers = list[Worker]()
        for line in _lines(path):
            try:
                workers += _of_entry(line, skip)
            except ValueError as error:
                if skip is None:
                    raise
                skip(f"{path}: {error}")
        return workers
    if not entry.startswith(DNS):
        return [worker_of(entry)]
    parts = urlsplit(entry.removeprefix(DNS))
    port = parts.port or (443 if parts.scheme == "https" else 80)
    addresses = {str(address[4][0]) for address in socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)}
    hosts = sorted(f"[{address}]" if ":" in address else address for address in addresses)
    return [worker_of(f"{parts.scheme}://{host}:{port}{'?' * bool(parts.query)}{parts.query}") for host in hosts]
