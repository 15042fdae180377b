"""`warmpath plan`: the capacity and hit rate of a cache for some memory, for equal prefixes or a trace."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serve_app.cli.console import fail
from serve_app.errors import unread

if TYPE_CHECKING:
    from serve_app.checkpoints.kv_planner import KvRoom
    from serve_app.checkpoints.reuse import ReuseCurve

_GOOD_PART = 0.9
"""Fraction of an unlimited cache's hit rate; the rest is expensive."""


def plan(
    memory: Annotated[str, typer.Option(help="memory of one replica, on all its GPUs, for weights and KV: 80GB")],
    model: Annotated[
        str | None, typer.Option(help="a model as for `warmpath serve`, or a config.json; fetches no weights")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="instead of a model: a settings file, for each of its models with its replicas")
    ] = None,
    prefixes: Annotated[int | None, typer.Option(min=1, help="number of distinct prefixes in use")] = None,
    prefix_tokens: Annotated[int | None, typer.Option(min=1, help="tokens of each prefix")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="instead of prefixes: a file of `traffic_log`, or Mooncake's JSON lines; or a .gz"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "bfloat16",
    replicas: Annotated[int, typer.Option(min=1, help="engine replicas")] = 1,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs of a replica that share each layer")] = 1,
    pipeline_parallel_size: Annotated[int, typer.Option(min=1, help="stages that share the layers")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Print a cache's capacity and the expected hit rate; exits with 2 for invalid input."""
    from pydantic import TypeAdapter, ValidationError

    from serve_app.checkpoints.checkpoint import CheckpointError
    from serve_app.checkpoints.kv_planner import kv_room
    from serve_app.checkpoints.sources import model_config
    from serve_app.config.quantities import Bytes
    from serve_app.request_files import TraceError

    if (trace is None) == (prefixes is None) or (prefixes is None) != (prefix_tokens is None):
        fail("give --prefixes and --prefix-tokens, or --trace")
    if (model is None) == (config is None):
        fail("give --model, or --config with a settings file")
    name = model or str(config)
    told: dict[str, tuple[dict[str, Any], str]] = {}
    try:
        memory_bytes = TypeAdapter(Bytes).validate_python(memory if not memory.isdecimal() else int(memory))
        curve = _curve_of(trace) if trace is not None else None
        flags = name, dtype, (tensor_parallel_size, pipeline_parallel_size), replicas
        wanted = _wanted(config, flags)
        for name, (which, kind, ranks, count) in wanted.items():
            room_of = partial(kv_room, model_config(which), kind, ranks=ranks)
            if curve is not None:
                told[name] = _by_trace(room_of, memory_bytes, count, curve)
            else:
                told[name] = _by_prefixes(room_of, memory_bytes, prefixes or 1, prefix_tokens or 1, count)
    except ValidationError as error:
        fail(f"--memory {error.errors()[0]['msg']}")
    except (CheckpointError, TraceError) as error:
        fail(str(error))
    except (OSError, ValueError) as error:
        fail(f"{name} cannot be planned: {unread(error)}")
    if model is not None:
        (figures, text), *_ = told.values()
        print(json.dumps(figures, indent=2) if as_json else text)
    elif as_json:
        print(json.dumps({name: figures for name, (figures, _) in told.items()}, indent=2))
    else:
        print("\n\n".join(f"{name}\n{text}" for name, (_, text) in told.items()))


def _curve_of(trace: Path) -> "ReuseCurve":
    """Return the curve of recorded traffic. Prints what is to know of the file; raises TraceError."""
    from serve_app.checkpoints.reuse import reuse_curve
    from serve_app.request_files import TraceError
    from serve_app.traffic.prompts import traced_prompts
    from serve_app.traffic.reader import read_traffic

    workload = read_traffic([trace])
    whole = workload.prompt_tokens >= workload.block_tokens
    without = int((whole & (workload.path_start[1:] == workload.path_start[:-1])).sum())
    if without and without == whole.sum():
        raise TraceError(f"{trace} tells no hash_ids, without which nothing is known to repeat")
    told = [f"{without} requests tell no hash_ids, and count as new prompts"] if without else []
    for warning in [*workload.warnings, *told]:
        print(f"warning: {warning}", file=sys.stderr)
    return reuse_curve(traced_prompts(workload), workload.block_tokens)


_Wanted = tuple[str, str, tuple[int, int], int]
"""A model, its dtype, its ranks and stages, its replicas."""


def _wanted(config: Path | None, flags: _Wanted) -> dict[str, _Wanted]:
    """Return what to plan by the model's name: what the flags say, or each model of a settings file."""
    from serve_app.config.files import load_settings

    if config is None:
        return {flags[0]: flags}
    return {
        name: (
            one.model,
            flags[1] if one.dtype == "auto" else one.dtype,
            one.rank_sizes,
            max(1, one.first_replicas),
        )
        for name, one in load_settings(config, ()).served().items()
    }


def _by_prefixes(
    room_of: "Callable[[int], KvRoom]", memory_bytes: int, prefixes: int, prefix_tokens: int, replicas: int
) -> tuple[dict[str, Any], str]:
    from serve_app.checkpoints.kv_planner import plan_kv

    plans = {size: plan_kv(room_of(size), prefixes, prefix_tokens, replicas) for size in _sizes(memory_bytes)}
    rows = [
        {"memory_bytes": size, "prefixes": plan.prefixes_per_replica * replicas, "hit_rate": plan.hit_rate}
        for size, plan in plans.items()
    ]
    wanted = plans[memory_bytes]
    if not wanted.replicas_needed:
        advice = "Not one prefix fits: take more memory, or a smaller model or dtype."
    elif wanted.replicas_needed > replicas:
        advice = f"{prefixes:,} prefixes need {wanted.replicas_needed} replicas, or host_cache_bytes."
    else:
        advice = "The working set fits; the rest is for running requests."
    text = f"""\
KV of a token: {wanted.bytes_per_token:,} bytes; of a prefix: {wanted.prefix_bytes:,} bytes \
({wanted.prefix_bytes / 2**30:.2f} GiB).
{_room_sentence(wanted.weights_bytes, wanted.kv_bytes, wanted.tokens_per_replica)}

{_table(rows, prefixes="prefixes held", hit_rate="hit rate")}

Expected hit rate, all prefixes being equally popular: {wanted.hit_rate:.0%}; \
{1000 * (1 - wanted.hit_rate):.0f} of 1,000 requests evict a prefix.
{advice}"""
    return {**asdict(wanted), "by_memory": rows}, text


def _by_trace(
    room_of: "Callable[[int], KvRoom]", memory_bytes: int, replicas: int, curve: "ReuseCurve"
) -> tuple[dict[str, Any], str]:
    room = room_of(memory_bytes)
    blocks = {size: room_of(size).tokens * replicas // curve.block_tokens for size in _sizes(memory_bytes)}
    rows = [
        {
            "memory_bytes": size,
            "kv_tokens": held * curve.block_tokens,
            "hit_rate": curve.hit_rate(held),
            "evicted_tokens_per_request": curve.evictions(held) * curve.block_tokens / curve.requests,
        }
        for size, held in blocks.items()
    ]
    headings = {"kv_tokens": "KV tokens in all", "hit_rate": "hit rate"}
    headings["evicted_tokens_per_request"] = "tokens evicted a request"
    highest = curve.hit_rate()
    good_bytes = curve.blocks_for(_GOOD_PART * highest) * curve.block_tokens * room.bytes_per_token
    text = f"""\
{curve.requests:,} requests with {curve.prompt_tokens:,} prompt tokens, {highest:.1%} of them seen before: \
no cache hits more.
{_room_sentence(room.weights_bytes, room.kv_bytes, room.tokens)}

{_table(rows, **headings)}

{_advice(good_bytes, room.kv_bytes, replicas, _GOOD_PART * highest)}"""
    figures = {
        **asdict(room),
        "requests": curve.requests,
        "prompt_tokens": curve.prompt_tokens,
        "highest_hit_rate": highest,
        "good_hit_rate": _GOOD_PART * highest,
        "good_kv_bytes": good_bytes,
        "by_memory": rows,
    }
    return figures, text


def _table(rows: list[dict[str, Any]], **columns: str) -> str:
    """Return a line for each row, by memory, below the headings of ``columns``."""
    lines = [f"{'memory a replica':>17}" + "".join(f"{heading:>{len(heading) + 3}}" for heading in columns.values())]
    for row in rows:
        cells = (
            f"{row[name]:>{len(heading) + 3}{'.1%' if name == 'hit_rate' else ',.0f'}}"
            for name, heading in columns.items()
        )
        lines.append(f"{_gb(row['memory_bytes']):>17}" + "".join(cells))
    return "\n".join(lines)


def _advice(good_bytes: int, kv_bytes: int, replicas: int, hit_rate: float) -> str:
    """Return the sentence about reaching ``hit_rate``: with the given memory, host memory or more replicas."""
    if not good_bytes:
        return "No prefix repeats: a prefix cache does not help these requests."
    takes = f"A hit rate of {hit_rate:.1%} (nine tenths of the maximum) needs {_gb(good_bytes)} of KV"
    lacking = good_bytes - kv_bytes * replicas
    if lacking <= 0:
        return f"{takes}; it fits."
    host = f"host_cache_bytes of {_gb(-(-lacking // replicas))} a replica"
    return f"{takes}: {-(-good_bytes // kv_bytes):,} replicas, or {host}." if kv_bytes else f"{takes}: {host}."


def _sizes(memory_bytes: int) -> list[int]:
    return [int(memory_bytes * part) for part in (0.25, 0.5, 1, 2, 4, 8)]


def _room_sentence(weights_bytes: int, kv_bytes: int, tokens: int) -> str:
    return f"Weights: about {_gb(weights_bytes)}, which leave {_gb(kv_bytes)} to KV: {tokens:,} tokens a replica."


def _gb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"
