"""From zero replicas to the first token of a long prompt: with what was saved, and without.

The model runs only for these requests; between two of them its replica stops (`min_replicas: 0`).
"""

import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.harness import Findings, Options, benchmark, flag, note
from benchmarks.common.prompts import text_of
from benchmarks.common.server import instance
from serve_app.checkpoints.sources import resolve_model
from serve_app.replay.client import chat_body, stream_chat

STOPS_AFTER_S = 10
NAME = "zero"


@benchmark(
    __doc__,
    flag("engine", "torch"),
    flag("prompt-tokens", 4000),
    flag("runs", 5),
    flag("set", [], "NAME=VALUE, a setting of the model; repeatable", action="append"),
    model="smollm2",
)
def run(options: Options) -> Findings:
    """Serve, and measure by turns."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "settings.yaml"
        settings.write_text(json.dumps(settings_of(options, folder)))
        with instance("--config", str(settings)) as url:
            rows = asyncio.run(measure(url, options))
    middle = {name: statistics.median(row) for name, row in rows.items()}
    times = ", ".join(f"{name} {middle_s:.1f} s" for name, middle_s in middle.items())
    ratio = middle["cold"] / middle["saved"]
    return Findings(
        {"ttft_s": rows, "median_s": middle},
        f"From zero to the first token: {times}; {ratio:.1f} times faster with what was saved.",
    )


def settings_of(options: Options, folder: str) -> dict[str, Any]:
    """Return settings of the model alone, with a disk below its cache."""
    more = dict(one.split("=", 1) for one in options.set)
    return {
        "model": options.model,
        "engine": options.engine,
        "served_model_name": NAME,
        "autoscaling": {"min_replicas": 0, "max_replicas": 1, "downscale_delay_s": STOPS_AFTER_S},
        "disk_cache_bytes": "4GiB",
        "disk_cache_dir": f"{folder}/disk",
        **more,
    }


async def measure(url: str, options: Options) -> dict[str, list[float]]:
    """Return the times to the first token from zero: of new prompts, of the saved one, and beside a running replica."""
    path = resolve_model(options.model)
    rows: dict[str, list[float]] = {"cold": [], "saved": [], "warm": []}
    saved = text_of(options.prompt_tokens, path, 0)
    async with httpx.AsyncClient(timeout=900) as client:

        async def ask(system: str, **more: Any) -> float:
            body = {**chat_body(NAME, 1, "Go on.", system), **more}
            return (await stream_chat(client, url, body)).ttft_s

        await ask(saved, save_system_prompt_kv_cache=True)
        for run in range(options.runs):
            await stopped(client, url)
            rows["cold"].append(await ask(text_of(options.prompt_tokens, path, 1 + run)))
            await stopped(client, url)
            rows["saved"].append(await ask(saved))
            rows["warm"].append(await ask(saved))
            note(json.dumps({name: row[-1] for name, row in rows.items()}))
    return rows


async def stopped(client: httpx.AsyncClient, url: str) -> None:
    """Return once no replica runs, and the last process is gone."""
    while (await client.get(f"{url}/health")).json()["replicas"]:  # noqa: ASYNC110 (another process)
        await asyncio.sleep(0.5)
    await asyncio.sleep(5)  # the process writes its cache before it ends
