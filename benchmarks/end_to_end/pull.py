"""KV pulls between two replicas over Ray's object store: how fast, and what they save, over HTTP.

Two replicas take requests in turn. Each prompt is sent four times: cold, then at the other replica, which pulls it or
computes it again, then warm at both.
"""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.prompts import text_of
from benchmarks.common.report import add_engine_flag, metric_sum, parser_of, progress, spread, write
from benchmarks.common.server import instance
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.cli.bench.client import Answer, chat_body, stream_chat

FEED_S = 0.5
"""Between requests, for a replica's news to reach the router."""


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__, "small")
    add_engine_flag(parser, ["torch", "vllm"], "torch")
    parser.add_argument("--prefix-tokens", type=int, nargs="+", default=[1000, 4000, 8000])
    parser.add_argument("--prompts", type=int, default=5, help="of each length")
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    model_path = resolve_model(arguments.model)
    results: dict[str, Any] = {}
    texts: dict[str, dict[tuple[int, int], list[str]]] = {}
    for name, pull in (("pull", "true"), ("compute", "false")):
        settings = [f"kv_pull={pull}", "policy=round_robin", f"dtype={arguments.dtype}", "min_pull_tokens=256"]
        settings.append(f"engine={arguments.engine}")
        if arguments.engine == "vllm":
            settings += [f"kv_cache_bytes={1 << 30}", "enforce_eager=true"]
        flags = [part for setting in settings for part in ("--set", setting)]
        with instance("--model", arguments.model, "--replicas", "2", *flags) as url:
            results[name], texts[name] = asyncio.run(measure(url, model_path, arguments))
    equal = texts["pull"] == texts["compute"]
    longest = str(max(arguments.prefix_tokens))
    pulled_ms, computed_ms = (results[name][longest]["elsewhere_ms"]["p50"] for name in ("pull", "compute"))
    said = (
        f"Where a replica lacks a prefix of {longest} tokens that its neighbour holds, the first token came after "
        f"{pulled_ms:.0f} ms pulled and {computed_ms:.0f} ms computed. Answers {'are' if equal else 'are not'} equal."
    )
    write(arguments.json, vars(arguments), {**results, "outputs_equal": equal}, said)


async def measure(
    url: str, model_path: Path, arguments: argparse.Namespace
) -> tuple[dict[str, Any], dict[tuple[int, int], list[str]]]:
    """Return figures by length, the pull counters, and all texts."""
    found: dict[str, Any] = {}
    texts: dict[tuple[int, int], list[str]] = {}
    async with httpx.AsyncClient(timeout=300) as client:

        async def ask(tokens: int, prompt: int) -> Answer:
            body = chat_body(arguments.model, 4, text_of(tokens, model_path, tokens + prompt))
            answer = await stream_chat(client, url, body)
            await asyncio.sleep(FEED_S)
            return answer

        for _ in range(4):  # a warm-up of connections and tokenizers
            await ask(2000, 10_000)
        for tokens in arguments.prefix_tokens:
            answers = []
            for prompt in progress(range(arguments.prompts), f"{tokens} tokens"):
                answers.append([await ask(tokens, prompt) for _ in range(4)])
                texts[tokens, prompt] = [answer.text for answer in answers[-1]]
            found[str(tokens)] = {
                "cold_ms": spread([1000 * sent[0].ttft_s for sent in answers]),
                "elsewhere_ms": spread([1000 * sent[1].ttft_s for sent in answers]),
                "warm_ms": spread([1000 * answer.ttft_s for sent in answers for answer in sent[2:]]),
                "elsewhere_cached_tokens_min": min(sent[1].cached_tokens for sent in answers),
            }
        await asyncio.sleep(1.0)
        metrics = (await client.get(f"{url}/metrics")).text
    names = ("warmpath_kv_pulls_total", "warmpath_kv_pulled_tokens_total", "warmpath_kv_pull_seconds_sum")
    pulls, tokens, seconds = (metric_sum(metrics, name) for name in names)
    found |= {"pulls": pulls, "pulled_tokens": tokens, "pull_tokens_per_s": tokens / seconds if seconds else 0.0}
    return found, texts


if __name__ == "__main__":
    main()
