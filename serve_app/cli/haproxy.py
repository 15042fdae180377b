"""HAProxy in front of a local instance: a wrapper program that Ray starts, with bounds for each client of the port.

Ray has options for the times of idle clients, but none for rules of its frontend, for the interfaces of HAProxy's pages
or for the texts of errors, and HAProxy takes a frontend's rules from one file alone. So the wrapper edits Ray's file.
Ray's own HAProxy has only the bounds of its options and of the ingress (`serve_app/ingress/connections.py`).
"""

import json
from dataclasses import dataclass
from pathlib import Path

from serve_app.api.openai.response import openai_error
from serve_app.errors import GenerationFailed, InvalidRequest, Overloaded, RequestTimeout, WarmpathError
from serve_app.ingress.connections import HEADER_TIMEOUT_S, MAX_CONNECTIONS, MAX_HEADER_BYTES, too_many
from serve_app.ingress.http import BODY_TIMEOUT_S

MAX_CONNECTIONS_PER_ADDRESS = 512
BUFFER_BYTES = MAX_HEADER_BYTES
"""HAProxy's buffer, its bound of headers. A request that fits is resent to another ingress if its first dies early."""
RETRY_ON = "conn-failure empty-response"
IDLE_TIMEOUT_S = 30
"""For a connection without a request."""


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
    rules, wrapper = run_dir / "frontend.rules", run_dir / "haproxy"
    rules.write_text(_frontend_rules(bounds))
    wrapper.write_text(_WRAPPER.format(stats=stats, metrics=metrics, binary=binary, rules=rules))
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
