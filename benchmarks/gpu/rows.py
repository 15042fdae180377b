"""What is measured of one replica, and of `vllm serve` beside it: figures and a sentence for each row."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any, NamedTuple

from benchmarks.common.report import BenchmarkError, spread
from benchmarks.end_to_end.front_door import since, used_so_far
from benchmarks.gpu.clients import Clients, RequestBody, answers
from benchmarks.gpu.shapes import Shape, text_of
from benchmarks.gpu.systems import MODEL, Target
from serve_app.replay.client import TimedAnswer, chat_body

RowFigures = dict[str, Any]
MeasuredRow = tuple[RowFigures, str]
Targets = Mapping[str, Target]
SYSTEM_TOKENS, QUESTION_TOKENS = 512, 32


class Bench(NamedTuple):
    """What every row needs. ``block_size``: tokens of a KV block; ``rest_s``: between two systems."""

    shape: Shape
    checkpoint: Path
    clients: Clients
    block_size: int
    rest_s: float = 0.0

    def turns(self, targets: Targets) -> Iterator[tuple[str, Target]]:
        """Yield the systems one after another; whatever one still does when it is done, it does not do to the next.

        vLLM's workers on CPUs look for work in a loop for a second after the last: that would be a core less for ours.
        """
        for name, target in targets.items():
            if len(targets) > 1:
                sleep(self.rest_s)
            yield name, target

    def chat(
        self, seed: object, max_tokens: int, system: str | None = None, tokens: int = QUESTION_TOKENS
    ) -> RequestBody:
        """Return a chat with a question that no other seed has; its answer has exactly ``max_tokens``."""
        return chat_body(MODEL, max_tokens, self.text(tokens, seed), system) | {"ignore_eos": True}

    def text(self, tokens: int, seed: object) -> str:
        """Return a text of so many tokens."""
        return text_of(tokens, self.checkpoint, seed)

    def prefill_tokens_per_s(self, target: Target) -> float:
        """Return the rate at which a system computes new prompts."""
        tokens = self.shape.prompts[0]
        bodies = [self.chat(f"rate {number}", 1, tokens=tokens) for number in range(4)]
        return tokens / median(answers(target, [body])[0].ttft_s for body in bodies)


def first_token(bench: Bench, targets: Targets, *, hits: bool = True) -> MeasuredRow:
    """TTFT of long prompts, new and with all but the question cached, one at a time.

    ``hits``: a prompt asked again with another question has to be cached, else BenchmarkError.
    """
    figures: RowFigures = {}
    for tokens in bench.shape.prompts:
        rows = figures[str(tokens)] = {name: {"cold_ms": [], "warm_ms": []} for name in targets}
        cached: dict[str, list[int]] = {name: [] for name in targets}
        for run in range(-1, bench.shape.runs):  # the first one warms up
            system = bench.text(tokens, f"first {tokens} {run}")
            for name, target in bench.turns(targets):
                for kind in rows[name]:
                    answer = answers(target, [bench.chat(f"{kind} {run}", 1, system)])[0]
                    cached[name] += [answer.cached_tokens] if kind == "warm_ms" else []
                    if (answer.cached_tokens >= tokens // 2) != (kind == "warm_ms") and (hits or kind == "cold_ms"):
                        raise BenchmarkError(f"{name}: {answer.cached_tokens} cached tokens of a prompt {kind[:4]}")
                    rows[name][kind] += [1000 * answer.ttft_s] if run >= 0 else []
        figures[str(tokens)] = {
            name: {kind: spread(ms) for kind, ms in row.items()} | {"cached_tokens": median(cached[name])}
            for name, row in rows.items()
        }
    said = "; ".join(
        f"{tokens} tokens " + _sentence(rows, "{cold_ms[p50]:.0f} ms new, {warm_ms[p50]:.0f} ms cached")
        for tokens, rows in figures.items()
    )
    return figures, f"First token: {said}."


def decode(bench: Bench, targets: Targets, **more: Any) -> MeasuredRow:
    """Tokens per second of concurrent streams, and the CPU time of each kind of process for a token.

    ``more``: fields of each request.
    """
    tokens, figures = bench.shape.answer_tokens, RowFigures()
    for streams in bench.shape.streams:
        rates: dict[str, list[float]] = {name: [] for name in targets}
        cpu_us: dict[str, list[dict[str, float]]] = {name: [] for name in targets}
        for run in range(bench.shape.runs):
            for name, target in bench.turns(targets):
                bodies = [{**bench.chat(f"decode {streams} {run} {n}", tokens), **more} for n in range(streams)]
                done, used_us = _with_cpu_us(target, lambda: bench.clients.answers(target, bodies))  # noqa: B023
                rates[name].append(streams * tokens / max(answer.total_s for answer in done))
                cpu_us[name].append(used_us)
        figures[str(streams)] = {
            name: {"tokens_per_s": spread(rates[name]), "cpu_us_a_token": _medians(cpu_us[name])} for name in targets
        }
    said = "; ".join(
        f"{streams} streams " + _sentence(rows, "{tokens_per_s[p50]:,.0f}") for streams, rows in figures.items()
    )
    return figures, f"Tokens per second (prompts of {QUESTION_TOKENS} tokens, answers of {tokens}): {said}."


def request(bench: Bench, targets: Targets) -> MeasuredRow:
    """CPU time and TTFT of short requests with a cached system prompt, one at a time."""
    figures: RowFigures = {}
    bodies = [bench.chat(f"request {n}", 1, bench.text(SYSTEM_TOKENS, "")) for n in range(1 + 20 * bench.shape.runs)]
    for name, target in bench.turns(targets):
        answers(target, bodies[:1])
        done, cpu_us = _with_cpu_us(target, lambda: [answers(target, [body])[0] for body in bodies[1:]])  # noqa: B023
        figures[name] = {
            "ttft_ms": spread([1000 * answer.ttft_s for answer in done]),
            "cpu_ms": sum(cpu_us.values()) / 1000,
            "cpu_us_by_kind": cpu_us,
        }
    said = _sentence(figures, "{ttft_ms[p50]:.1f} ms, {cpu_ms:.1f} ms of CPU time")
    return figures, f"A short request with a cached system prompt: {said}."


def _sentence(rows: RowFigures, form: str) -> str:
    return ", ".join(f"{name} {form.format(**row)}" for name, row in rows.items())


def _with_cpu_us(
    target: Target, measure: Callable[[], list[TimedAnswer]]
) -> tuple[list[TimedAnswer], dict[str, float]]:
    """Return answers, and the CPU time of the system's kinds of processes for each of their tokens."""
    before = used_so_far(target.mark)
    done = measure()
    tokens = sum(answer.completion_tokens for answer in done)
    return done, since(before.cpu_s, used_so_far(target.mark).cpu_s, 1e6 / tokens)


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    kinds = sorted({kind for run in runs for kind in run})
    return {kind: median(run.get(kind, 0.0) for run in runs) for kind in kinds}
