"""System calls of a streamed token and of a short request, counted on real Ray Serve behind HAProxy."""

import asyncio
import shutil

import pytest

from benchmarks.common.harness import Options
from benchmarks.end_to_end.front_door import count_calls, measured

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace: apt-get install strace"),
]

MOST_A_TOKEN = {
    ("ingress", "write"): 1.1,
    ("ingress", "sendmsg"): 0.1,
    ("haproxy", "recvfrom"): 1.1,
    ("haproxy", "sendto"): 1.1,
    ("replica", "sendto"): 0.5,
    ("replica", "write"): 0.5,
}
"""Those that come with tokens, not with time or steps. The last two are of messages for all answers of a step."""
MOST_A_REQUEST = {("haproxy", "recvfrom"): 8, ("haproxy", "sendto"): 6, ("ingress", "write"): 16}


def test_a_token_takes_one_write_and_a_look_and_a_write_of_haproxy() -> None:
    options = Options(model="demo", replicas=2, clients=64, max_tokens=60, short_requests=90)
    with measured("warmpath", options) as place:
        calls = asyncio.run(count_calls(*place, options))
    for unit, most in (("a_token", MOST_A_TOKEN), ("a_request", MOST_A_REQUEST)):
        for (kind, call), bound in most.items():
            assert calls[unit][kind].get(call, 0.0) <= bound, (unit, kind, call, calls[unit][kind])
    assert calls["a_token"]["ingress"]["write"] > 0, "strace saw the ingress"
