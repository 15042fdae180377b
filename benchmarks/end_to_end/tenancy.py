"""What authentication, a tenant's limits and accounting together add to the TTFT of a warm request.

Two instances of one replica each run at once, with tenants, all three limits and a usage file, and with none; each pair
asks both the same question behind the same cached prefix, in turns. `python -m benchmarks tenancy --json FILE`
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.common.client import chat_body, stream_answer
from benchmarks.common.paired import alternate, ratios
from benchmarks.common.prompts import text_of
from benchmarks.common.report import parser_of, write
from benchmarks.common.server import instance
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.tenants.tenants import make_api_key

TENANTS = 100
"""The one that asks is the last of so many."""
_LIMITS = {"requests_per_second": 100_000, "concurrent_requests": 1000, "tokens_per_minute": 10**9}


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__, "small")
    parser.add_argument("--prefix-tokens", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=100, help="at least 5")
    arguments = parser.parse_args()
    if arguments.pairs < 5:
        parser.error("--pairs must be at least 5: fewer say nothing")
    found = asyncio.run(_measure(arguments))
    low, high = found["interval"]
    said = (
        f"TTFT of a warm request with authentication, limits and accounting / without, {arguments.pairs} pairs: "
        f"{found['ratio']:.3f} (95 %: {low:.3f} to {high:.3f}); medians {1000 * found['measured']['p50']:.1f} and "
        f"{1000 * found['against']['p50']:.1f} ms."
    )
    write(arguments.json, vars(arguments), {"ttft_ratio": found["ratio"], "details": found}, said)


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model = resolve_model(arguments.model)
    system = text_of(arguments.prefix_tokens, model, 0)
    key, settings = _settings()
    flags = ("--model", arguments.model, "--replicas", "1")
    with tempfile.TemporaryDirectory(prefix="warmpath-tenancy-") as directory:
        file = Path(directory) / "settings.yaml"
        file.write_text(yaml.safe_dump({**settings, "usage_file": str(Path(directory) / "usage.sqlite")}))
        with instance(*flags) as plain, instance(*flags, "--config", str(file)) as guarded:
            async with httpx.AsyncClient(timeout=300) as client:

                async def ttft_s(url: str, pair: int, headers: dict[str, str]) -> float:
                    body = chat_body(arguments.model, 1, text_of(32, model, 1 + pair), system)
                    answer = await stream_answer(client, f"{url}/v1/chat/completions", body, headers)
                    if pair >= 0 and answer.cached_tokens < arguments.prefix_tokens - 32:
                        raise RuntimeError(f"{answer.cached_tokens} tokens came from the cache")
                    return answer.ttft_s

                ours = {"authorization": f"Bearer {key}"}
                for _ in range(3):  # connections, kernels and the cache are paid by requests that count for nothing
                    await ttft_s(guarded, -1, ours)
                    await ttft_s(plain, -1, {})
                return ratios(
                    *await alternate(
                        arguments.pairs, lambda pair: ttft_s(guarded, pair, ours), lambda pair: ttft_s(plain, pair, {})
                    )
                )


def _settings() -> tuple[str, dict[str, Any]]:
    """Return the key of the last of many tenants, and settings with all of them and an operator."""
    keys = [make_api_key() for _ in range(TENANTS + 1)]
    tenants = [{"name": f"tenant-{n}", "key_sha256": [digest], **_LIMITS} for n, (_, digest) in enumerate(keys[1:])]
    return keys[-1][0], {"tenants": tenants, "operator_key_sha256": [keys[0][1]]}


if __name__ == "__main__":
    main()
