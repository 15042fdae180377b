"""Real databases on loopback, for tests of stored responses; tests without an installed server are skipped."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 60


class Server:
    """A database server on loopback, which may be killed and restarted. ``connect``: returns once it answers."""

    def __init__(self, command: list[str], url: str, connect: Callable[[], Any], user: str | None = None) -> None:
        self._command = command
        self._user = user
        self._connect = connect
        self.url = url
        self.start()

    def start(self) -> Any:
        """Start it, and wait until it answers."""
        self._run()
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._connect()
            except Exception:  # any exception of a client
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
                if self._process.poll() is not None:  # processes of a killed Postgres may still exist
                    self._run()

    def _run(self) -> None:
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, user=self._user, stdout=quiet, stderr=quiet, cwd="/")

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it, with its child processes."""
        self._process.send_signal(signal.SIGINT)  # Postgres would wait for its clients after a SIGTERM
        self._process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def _directory() -> Iterator[Path]:
    """Yield a directory that another user can own: pytest's are closed to others."""
    directory = Path(tempfile.mkdtemp(prefix="warmpath-db-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def redis_server() -> Iterator[Server]:
    """A Redis that acknowledges nothing before it is on disk."""
    redis = pytest.importorskip("redis", reason="pip install '.[redis]'")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("apt-get install redis-server")
    with _directory() as directory:
        port = _free_port()
        options = f"--port {port} --bind 127.0.0.1 --dir {directory} --appendonly yes --appendfsync always --save"
        url = f"redis://127.0.0.1:{port}/0"
        server = Server([program, *options.split(), ""], url, lambda: redis.Redis.from_url(url).ping())
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def postgres_server() -> Iterator[Server]:
    """A Postgres with its defaults, run by an unprivileged user."""
    psycopg = pytest.importorskip("psycopg", reason="pip install '.[postgres]'")
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        pytest.skip("apt-get install postgresql")
    user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    with _directory() as directory:
        if os.geteuid() == 0:
            shutil.chown(directory, user)
        data, port = directory / "data", _free_port()
        made = [str(programs[-1] / "initdb"), "-D", str(data), "-A", "trust", "-U", "stored", "-E", "UTF8"]
        as_user = user if os.geteuid() == 0 else None
        subprocess.run(made, user=as_user, check=True, stdout=subprocess.DEVNULL, cwd="/")
        options = f"-D {data} -p {port} -h 127.0.0.1 -k {directory}"
        url = f"postgresql://stored@127.0.0.1:{port}/postgres"
        command = [str(programs[-1] / "postgres"), *options.split()]
        server = Server(command, url, lambda: psycopg.connect(url).close(), as_user)
        try:
            yield server
        finally:
            server.stop()


SERVERS: dict[str, Callable[[], Iterator[Server]]] = {"redis": redis_server, "postgres": postgres_server}  # type: ignore[dict-item]


@pytest.fixture(scope="package", params=["sqlite", *SERVERS])
def url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """The place to store: None for a file, and the URL of each installed server."""
    if request.param == "sqlite":
        yield None
        return
    with SERVERS[request.param]() as server:
        yield server.url
