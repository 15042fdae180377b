"""From zero replicas to the first token of a long prompt: with what was saved, and without.

The model runs only for these requests; between two of them its replica stops (`min_replicas: 0`).
"""

import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.prompts import text_of
from benchmarks.common.report import parser_of, write
from benchmarks.common.server import instance
from serve_app.checkpoints.sources import resolve_model
from serve_app.cli.bench import chat_body, stream_chat

STOPS_AFTER_S = 10
NAME = "zero"


def main() -> None:
    """Parse flags, serve, measure by turns, write the JSON."""
    parser = parser_of(__doc__, "smollm2")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE, a setting of the model; repeatable")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "settings.yaml"
        settings.write_text(json.dumps(settings_of(arguments, folder)))
        with instance("--config", str(settings)) as url:
            rows = asyncio.run(measure(url, arguments))
    middle = {name: statistics.median(row) for name, row in rows.items()}
    said = ", ".join(f"{name} {middle_s:.1f} s" for name, middle_s in middle.items())
    ratio = middle["cold"] / middle["saved"]
    summary = f"From zero to the first token: {said}; {ratio:.1f} times faster with what was saved."
    write(arguments.json, vars(arguments), {"ttft_s": rows, "median_s": middle}, summary)


def settings_of(arguments: Any, folder: str) -> dict[str, Any]:
    """Return settings of the model alone, with a disk below its cache."""
    more = dict(one.split("=", 1) for one in arguments.set)
    return {
        "model": arguments.model,
        "engine": arguments.engine,
        "served_model_name": NAME,
        "autoscaling": {"min_replicas": 0, "max_replicas": 1, "downscale_delay_s": STOPS_AFTER_S},
        "disk_cache_bytes": "4GiB",
        "disk_cache_dir": f"{folder}/disk",
        **more,
    }


async def measure(url: str, arguments: Any) -> dict[str, list[float]]:
    """Return the times to the first token from zero: of new prompts, of the saved one, and beside a running replica."""
    path = resolve_model(arguments.model)
    rows: dict[str, list[float]] = {"cold": [], "saved": [], "warm": []}
    saved = text_of(arguments.prompt_tokens, path, 0)
    async with httpx.AsyncClient(timeout=900) as client:

        async def ask(system: str, **more: Any) -> float:
            body = {**chat_body(NAME, 1, "Go on.", system), **more}
            return (await stream_chat(client, url, body)).ttft_s

        await ask(saved, save_system_prompt_kv_cache=True)
        for run in range(arguments.runs):
            await stopped(client, url)
            rows["cold"].append(await ask(text_of(arguments.prompt_tokens, path, 1 + run)))
            await stopped(client, url)
            rows["saved"].append(await ask(saved))
            rows["warm"].append(await ask(saved))
            print(json.dumps({name: row[-1] for name, row in rows.items()}), file=sys.stderr, flush=True)
    return rows


async def stopped(client: httpx.AsyncClient, url: str) -> None:
    """Return once no replica runs, and the last process is gone."""
    while (await client.get(f"{url}/health")).json()["replicas"]:  # noqa: ASYNC110 (another process)
        await asyncio.sleep(0.5)
    await asyncio.sleep(5)  # the process writes its cache before it ends


if __name__ == "__main__":
    main()
