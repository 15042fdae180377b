"""HAProxy in front of a local instance: the program that Ray starts as it, with bounds for each client of the port."""

import json
from dataclasses import dataclass
from pathlib import Path

from serve_app.api.openai.response import openai_error
from serve_app.errors import GenerationFailed, InvalidRequest, Overloaded, RateLimited, RequestTimeout, WarmpathError

MAX_CONNECTIONS_PER_ADDRESS = 512
BUFFER_BYTES = 64 << 10
"""What HAProxy holds of a request: one that fits is sent to another ingress when its own dies before it answers."""
RETRY_ON = "conn-failure empty-response"
TOLD_CONNECTIONS = 64
"""Connections over an address' bound that are told so with a 429; more are closed as they come."""


@dataclass(frozen=True, slots=True)
class PortBounds:
    """What one client may hold of the port.

    ``body_timeout_s``: for what of a body fits the buffer; ``stall_timeout_s``: with no byte sent or taken.
    """

    connections_per_address: int = MAX_CONNECTIONS_PER_ADDRESS
    header_timeout_s: int = 10
    body_timeout_s: int = 30
    idle_timeout_s: int = 30
    stall_timeout_s: int = 60


_WRAPPER = """#!/bin/sh
# Ray binds HAProxy's statistics and metrics pages to every interface, and opens its admin socket to every user;
# this instance has no use for either beyond this machine and this user. `option splice-request` keeps HAProxy 2.8 from
# seeing a client that leaves before its answer begins. $3 is the config file (-db -f FILE ...).
sed -i -E 's/^( *bind) \\*?:({stats}|{metrics})$/\\1 127.0.0.1:\\2/; s/(stats socket .*) mode 666/\\1 mode 600/' "$3"
sed -i -E '/^ *option splice-re(quest|sponse)/d; /^ *errorfile 50[234] /d' "$3"
grep -q 'track-sc0' "$3" || sed -i '/^frontend http_frontend$/,/^ *bind /{{
/^ *bind /r {rules}
}}' "$3"
exec '{binary}' "$@"
"""

_RULES = """\
    timeout http-request {bounds.header_timeout_s}s
    timeout http-keep-alive {bounds.idle_timeout_s}s
    timeout client {bounds.stall_timeout_s}s
    # Only a request that is here whole can be sent again.
    http-request wait-for-body time {bounds.body_timeout_s}s if METH_POST
    # One address of IPv6 is a network of 64 bits: whoever has one address there has them all.
    stick-table type ipv6 size 100k expire 10m store conn_cur
    tcp-request connection track-sc0 src,ipmask(32,64)
    tcp-request connection reject if {{ sc0_conn_cur gt {most} }}
    tcp-request connection set-var(sess.refused) bool(true) if {{ sc0_conn_cur gt {bounds.connections_per_address} }}
    http-request return {refused} hdr Connection close if {{ var(sess.refused) -m bool }}
    # Ray's proxy stands in while no ingress is known to be up, and says no more of one that dies under it.
    http-response return {broken_off} if {{ status 500 }} {{ res.hdr(content-type) -m beg text/plain }}
{errors}
"""


def write_wrapper(run_dir: Path, *, binary: str, stats: int, metrics: int, bounds: PortBounds) -> Path:
    """Write the program that Ray is to start as HAProxy; return its path. ``stats``, ``metrics``: HAProxy's ports."""
    rules, wrapper = run_dir / "frontend.rules", run_dir / "haproxy"
    rules.write_text(_frontend_rules(bounds))
    wrapper.write_text(_WRAPPER.format(stats=stats, metrics=metrics, binary=binary, rules=rules))
    wrapper.chmod(0o700)
    return wrapper


def _frontend_rules(bounds: PortBounds) -> str:
    most = bounds.connections_per_address
    too_many = RateLimited(
        f"Your address has over {most} connections open; close some, or start the server with a larger "
        "--max-connections-per-address.",
        code="too_many_connections",
        retry_after_s=1,
    )
    broken_off = Overloaded("The answer broke off before it began; send the request again.", retry_after_s=1)
    # HAProxy's own 400 and 408 for headers that are not HTTP, or do not end, are fixed text and cannot be set.
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
        most=most + TOLD_CONNECTIONS,
        refused=_answer(429, too_many),
        broken_off=_answer(502, broken_off),
        errors="\n".join(f"    http-error {_answer(status, error)}" for status, error in errors.items()),
    )


def _answer(status: int, error: WarmpathError) -> str:
    body = json.dumps(openai_error(error, "").body)
    retry_after = "" if error.retry_after_s is None else f" hdr Retry-After {error.retry_after_s:.0f}"
    return f"status {status} content-type application/json string '{body}'{retry_after}"
