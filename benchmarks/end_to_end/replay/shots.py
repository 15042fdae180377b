"""The requests of a replay: from a trace of block ids, a log of requests, or generated traffic of many tenants."""

import argparse
import json
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from benchmarks.common.trace import add_trace_flags, chosen_trace
from benchmarks.end_to_end.replay.request_log import COMPLETIONS, is_log, read_log
from benchmarks.end_to_end.replay.text import TraceText
from benchmarks.traffic.tenants import TrafficSettings, tenant_traffic
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest
from serve_app.checkpoints.sources import resolve_model
from serve_app.replay.open_loop import Shot

TENANTS = "tenants"
KEY_VARIABLE = "OPENAI_API_KEY"
DEFAULT_MODEL = "demo"
_TRACE_REQUESTS = 500


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``shots_of`` reads."""
    parser.add_argument(
        "--model", help=f"the model's name at the server (default: {DEFAULT_MODEL}; for a log: the log's)"
    )
    parser.add_argument("--tokenizer", help="checkpoint with the prompts' tokenizer (default: the model's)")
    sources = f'a trace of block ids or a log of requests (JSON lines, gzipped or plain), or "{TENANTS}"'
    add_trace_flags(parser, _TRACE_REQUESTS, f"{sources} (default: the published trace)")
    parser.set_defaults(requests=None)
    parser.add_argument("--speed", type=float, default=0.25, help="divides the timestamps, before shrinking")
    parser.add_argument("--tokens-per-id", type=int, default=64, help="replaces a trace's 512: the shrinking factor")
    parser.add_argument(
        "--api-keys", type=Path, metavar="FILE", help='JSON, {"tenant": "key"}; "$NAME" is read from the environment'
    )
    tenants = parser.add_argument_group(f"--trace {TENANTS}", "traffic of many tenants during a part of a day")
    tenants.add_argument("--tenants", type=int, default=8, help="single clients of a production service, at most 16")
    tenants.add_argument("--requests-per-s", type=float, default=1.0, help="of all tenants, before the shrinking")
    tenants.add_argument("--start-hour", type=float, default=8.0, help="hour of the day at the start")
    tenants.add_argument("--seconds", type=float, default=600.0, help="length of the part of the day")
    tenants.add_argument("--system-prompts", type=int, default=12, help="for each tenant, with Zipf's popularity")


def read_keys(options: argparse.Namespace) -> dict[str, str]:
    """Return keys by tenant; the key of "" is for all others. Raises ValueError for an unset variable."""
    keys = {"": os.environ[KEY_VARIABLE]} if KEY_VARIABLE in os.environ else {}
    if options.api_keys is not None:
        keys |= json.loads(options.api_keys.read_text())
    for tenant, key in keys.items():
        if key.startswith("$"):
            if key[1:] not in os.environ:
                raise ValueError(f"the key of {tenant} is {key}, but there is no such variable")
            keys[tenant] = os.environ[key[1:]]
    return keys


def shots_of(options: argparse.Namespace, keys: dict[str, str]) -> list[Shot]:
    """Return the shots that the flags select. Raises ValueError if there are none.

    Requests without a tenant are distributed over tenants with keys, a whole conversation to the same one.
    """
    if options.trace != TENANTS and is_log(Path(options.trace)):
        return _log_shots(options, keys)
    if options.trace == TENANTS:
        settings = TrafficSettings(
            options.requests_per_s,
            options.seconds,
            options.start_hour * 3600.0,
            options.tenants,
            options.system_prompts,
            seed=options.seed,
        )
        trace = list(islice(tenant_traffic(settings), options.skip, None))[: options.requests]
        if not trace:
            raise ValueError("there are no requests in that part of the day: choose a longer one, or a higher rate")
    else:
        options.requests = options.requests or _TRACE_REQUESTS
        trace = chosen_trace(options)
    tokenizer = resolve_model(options.tokenizer or options.model or DEFAULT_MODEL)
    return trace_shots(trace, TraceText(tokenizer, options.tokens_per_id), options, keys)


def trace_shots(
    trace: Sequence[TraceRequest], text: TraceText, options: argparse.Namespace, keys: dict[str, str]
) -> list[Shot]:
    """Return a trace's shots, with text as prompts."""
    shrink = TRACE_BLOCK_TOKENS / text.tokens_per_id
    named = [tenant for tenant in keys if tenant] or ["default"]
    firsts = {request.hash_ids[:1] for request in trace}
    opening = 1 if len(firsts) > 1 else 2  # all prompts of the published trace have the same first block
    shots = []
    for request in trace:
        tenant = request.tenant or named[hash(request.hash_ids[:opening]) % len(named)]
        body = {
            "model": options.model or DEFAULT_MODEL,
            "prompt": text.prompt(request),
            "max_tokens": text.output_tokens(request),
            "temperature": 0,
        }
        at_s = (request.arrival_s - trace[0].arrival_s) / options.speed / shrink
        shots.append(Shot(at_s, COMPLETIONS, body, tenant, keys.get(tenant, keys.get("", ""))))
    return shots


def _log_shots(options: argparse.Namespace, keys: dict[str, str]) -> list[Shot]:
    log = read_log(Path(options.trace))[options.skip :][: options.requests]
    named = [tenant for tenant in keys if tenant] or ["default"]
    shots = []
    for number, request in enumerate(log):
        tenant = request.tenant or named[number % len(named)]
        at_s = (request.at_s - log[0].at_s) / options.speed
        # A log names another server's model, unless it was recorded at the same server.
        body = request.body | ({"model": options.model} if options.model else {})
        shots.append(Shot(at_s, request.path, body, tenant, keys.get(tenant, keys.get("", ""))))
    return shots
