"""Rows with servers of their own: drafts by an EAGLE head, and a model whose layers see a window."""

import asyncio
import re
from statistics import median
from time import sleep
from typing import Any

from benchmarks.common.report import metric_sum
from benchmarks.gpu import rows, two
from benchmarks.gpu.clients import answers, ask, new_client
from benchmarks.gpu.rows import Bench, MeasuredRow, RowFigures, Targets
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.systems import Target, Warmpath

DRAFT_TOKENS = 3
HELD_PROMPTS, HELD_TOKENS, READ_EVERY_S = 4, 256, 0.25
"""Prompts whose answers, of so many tokens, run while blocks are counted, and the time between two counts."""
_PREFIXES = ("warmpath_", "vllm:")


def drafts(bench: Bench, targets: Targets, ours: Warmpath | None) -> MeasuredRow:
    """What drafts cost, and whether an exact repeat finds as much with them as without; nothing that they bring.

    The head's weights are random, as the model's. Without drafts: requests that turn them off, which only ours knows.
    """
    bench = bench._replace(shape=_shorter(bench, streams=(1, 16)))
    tokens, said = _repeats(bench, targets)
    before = {name: drafted(target) for name, target in targets.items()}
    with_drafts, rates = rows.decode(bench, targets)
    sleep(1.0)  # reports of counters
    accepted: RowFigures = {}
    for name, target in targets.items():
        proposed, taken = (now - then for now, then in zip(drafted(target), before[name], strict=True))
        accepted[name] = taken / proposed if proposed else None
    off, without = {name: target for name, target in targets.items() if name == "warmpath"}, RowFigures()
    if off:
        without, slower = rows.decode(bench, off, disable_spec_decode=True)
        rates += f" Without drafts: {slower}"
    first, firsts = rows.first_token(bench, targets)
    figures = {"repeats": tokens, "decode": with_drafts, "decode_without": without, "first_token": first}
    shares = ", ".join(f"{name} {share:.0%}" for name, share in accepted.items() if share is not None)
    return figures | {"accepted": accepted}, f"{said} {rates} {firsts} Accepted drafts of a random head: {shares}."


def windowed(bench: Bench, targets: Targets, ours: Warmpath | None) -> MeasuredRow:
    """The KV that prompts hold while their answers run, and what a repeat of them finds, and another question.

    By default vLLM keeps the KV of a window only at a prompt's end, where only the same prompt finds it.
    """
    bench = bench._replace(shape=_shorter(bench, predictions=51))
    used = {name: _most_used_blocks(bench, target) for name, target in targets.items()}
    repeats, said = _repeats(bench, targets)
    first, firsts = rows.first_token(bench, targets, hits=False)
    for tokens, row in first.items():
        hits = ", ".join(f"{name} {row[name]['cached_tokens']:.0f}" for name in targets)
        firsts += f" Another question after {tokens} tokens finds {hits}."
    figures: RowFigures = {"held_blocks": used, "repeats": repeats, "first_token": first}
    if ours is not None and "warmpath" in targets:
        figures["predictions"], predicted = two.predictions(bench, ours)
        firsts += f" {predicted}"
    blocks = ", ".join(f"{name} {row['held']:.0f} of {row['pool']:.0f}" for name, row in used.items())
    prompts = f"{HELD_PROMPTS} prompts of {bench.shape.prompts[-1]} tokens"
    return figures, f"Blocks that {prompts} hold while they are answered: {blocks}. {said} {firsts}"


def _shorter(bench: Bench, **changed: Any) -> Shape:
    return bench.shape._replace(runs=min(3, bench.shape.runs), answer_tokens=bench.shape.answer_tokens // 2, **changed)


def _repeats(bench: Bench, targets: Targets) -> tuple[RowFigures, str]:
    """Return what exact repeats of prompts find, as a part of the whole blocks before their last token."""
    longest, block, repeats = bench.shape.prompts[0], bench.block_size, RowFigures()
    for name, target in targets.items():
        repeats[name] = []
        for tokens in (longest // 16, longest // 8 + 1, longest // 4 + 7, longest // 2 + 15, longest):
            body = bench.chat(f"repeat {tokens}", 8, tokens=tokens)
            first, again = (answers(target, [body])[0] for _ in range(2))
            whole = (again.prompt_tokens - 1) // block * block
            figures = {"prompt_tokens": again.prompt_tokens, "cached_tokens": again.cached_tokens}
            repeats[name].append({**figures, "share": again.cached_tokens / whole, "new": first.cached_tokens})
    shares = ", ".join(
        f"{name} {median(row['share'] for row in repeats[name]):.2f} "
        f"({', '.join(str(row['cached_tokens']) for row in repeats[name])})"
        for name in repeats
    )
    lengths = ", ".join(str(row["prompt_tokens"]) for row in next(iter(repeats.values())))
    return repeats, f"Exact repeats of {lengths} tokens find of what is possible: {shares}."


def _most_used_blocks(bench: Bench, target: Target) -> dict[str, float]:
    """Return the most blocks in use while prompts are answered that were computed before, and the pool."""
    tokens = bench.shape.prompts[-1]
    bodies = [bench.chat(f"held {number}", HELD_TOKENS, tokens=tokens) for number in range(HELD_PROMPTS)]
    answers(target, [{**body, "max_tokens": 1} for body in bodies])

    async def count() -> list[tuple[float, float]]:
        async with new_client() as client:
            running, counts = asyncio.gather(*(ask(client, target, body) for body in bodies)), []
            while not running.done():
                counts.append(blocks_in_use(await asyncio.to_thread(target.metrics)))
                await asyncio.sleep(READ_EVERY_S)
            await running
            return counts

    used, pool = max(asyncio.run(count()))
    return {"held": used, "pool": pool}


def blocks_in_use(metrics: str) -> tuple[float, float]:
    """Return the blocks in use, and all."""
    if size := re.search(r'vllm:cache_config_info{.*num_gpu_blocks="(\d+)"', metrics):
        blocks = float(size[1]) - 1  # without vLLM's null block
        return round(blocks * metric_sum(metrics, "vllm:kv_cache_usage_perc")), blocks
    blocks = metric_sum(metrics, "warmpath_kv_cache_blocks")
    return metric_sum(metrics, "warmpath_kv_cache_blocks", 'state="used"'), blocks


def drafted(target: Target) -> tuple[float, float]:
    """Return the numbers of drafted and of accepted tokens so far."""
    metrics, kinds = target.metrics(), ("draft", "accepted")
    names = [[f"{system}spec_decode_num_{kind}_tokens_total" for system in _PREFIXES] for kind in kinds]
    drafted, accepted = (sum(metric_sum(metrics, name) for name in both) for both in names)
    return drafted, accepted
