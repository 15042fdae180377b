"""`warmpath plan`: whether a working set of prefixes fits, in numbers and sentences."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from serve_app.checkpoints.kv_planner import KvPlan, plan_kv
from serve_app.cli.console import fail
from serve_app.config.quantities import Bytes


def plan(
    model: Annotated[Path, typer.Option(help="directory with a config.json, or that file; weights are not needed")],
    prefixes: Annotated[int, typer.Option(min=1, help="distinct prefixes that are in use")],
    prefix_tokens: Annotated[int, typer.Option(min=1, help="tokens of each")],
    memory: Annotated[str, typer.Option(help="of one replica, for weights and KV: 80GB")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "bfloat16",
    replicas: Annotated[int, typer.Option(min=1, help="engine replicas")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="figures for machines")] = False,
) -> None:
    """Say how many prefixes a cache holds, and what hit rate to expect; leaves with 2 for what cannot be planned."""
    try:
        memory_bytes = TypeAdapter(Bytes).validate_python(memory if not memory.isdecimal() else int(memory))
        fields = json.loads((model / "config.json" if model.is_dir() else model).read_text())
        fields = fields.get("text_config") or fields
        found = plan_kv(
            fields,
            dtype,
            memory_bytes=memory_bytes,
            prefixes=prefixes,
            prefix_tokens=prefix_tokens,
            replicas=replicas,
        )
    except ValidationError as error:
        fail(f"--memory {error.errors()[0]['msg']}")
    except (KeyError, AttributeError) as error:
        fail(f"{model} lacks a size that a language model's config has: {error}")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        fail(f"{model} is neither a directory with a config.json nor such a file")
    except (OSError, ValueError, TypeError) as error:
        fail(f"{model} cannot be read or planned: {error}")
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    print("\n".join(_sentences(found, prefixes, replicas)))


def _sentences(found: KvPlan, prefixes: int, replicas: int) -> list[str]:
    lines = [
        f"KV of a token: {found.bytes_per_token:,} bytes; of a prefix: {found.prefix_bytes:,} bytes "
        f"({found.prefix_bytes / 2**30:.2f} GiB).",
        f"Weights: about {found.weights_bytes / 1e9:.1f} GB, which leave {found.kv_bytes / 1e9:.1f} GB to KV: "
        f"{found.tokens_per_replica:,} tokens or {found.prefixes_per_replica:,} prefixes a replica, "
        f"{found.prefixes_per_replica * replicas:,} in all.",
    ]
    if not found.replicas_needed:
        return [*lines, "Not one prefix fits: take more memory, or a smaller model or dtype."]
    lines.append(
        f"Expected hit rate, all prefixes being equally popular: {found.hit_rate:.0%}; "
        f"{1000 * (1 - found.hit_rate):.0f} of 1,000 requests evict a prefix."
    )
    if found.replicas_needed > replicas:
        lines.append(f"{prefixes:,} prefixes need {found.replicas_needed} replicas, or host_cache_bytes.")
    else:
        lines.append("The working set fits; what is left is for running requests.")
    return lines
