"""One tenant attacks a real instance: what the others notice. Alone and under attack are measured in one run.

`storm`: a tenant with small chats beside another's retry storm. `neighbours`: nine tenants at half of the replicas'
load, beside one that attacks in three ways in turn; their questions come at the same moments in every part.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from benchmarks.common.open_loop import Result, Shot, fire, hit_rate
from benchmarks.common.prompts import WORDS
from benchmarks.common.report import metric_sum, names_of, parser_of, percentile, write
from benchmarks.common.server import instance
from benchmarks.isolation.hostile.attacks import ATTACKS, CHAT, Target, attack
from serve_app.tenants.tenants import make_api_key

SCENARIOS = ("storm", "neighbours")
ATTACKER = "acme"
POLITE = ("zeta", *(f"shop-{number}" for number in range(1, 9)))
REPLICAS = 2
WARM_UP_S = 3.0
SYSTEM_PROMPTS, SYSTEM_WORDS = 3, 500
EVERY_S = 2.5
LOAD = 0.5
"""What the nine take of the replicas' prefill."""
TOKENS_A_WORD = 1.35
"""With the demo model's tokenizer."""
TIMEOUT_S = 30.0
_RULES = "Answer questions about contracts with care, and always name clause, date and party. " * 4

Ask = Callable[[int], dict[str, Any]]
"""From a request's number to the body of its chat completion."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One instance. ``keys``: by tenant."""

    url: str
    keys: dict[str, str]
    operator_key: str

    def target(self) -> Target:
        """Return the attacker's target."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        return Target(parts.hostname, parts.port, self.keys[ATTACKER])

    async def question_words(self) -> int:
        """Return the length of the nine's questions, by the replicas' measured rates."""
        headers = {"authorization": f"Bearer {self.operator_key}"}
        async with httpx.AsyncClient(headers=headers) as client:
            metrics = (await client.get(f"{self.url}/metrics")).raise_for_status().text
        rate = metric_sum(metrics, "warmpath_prefill_tokens_per_second")
        return int(rate * LOAD * EVERY_S / len(POLITE) / TOKENS_A_WORD)


@contextmanager
def stage(engine: str) -> Iterator[Stage]:
    """Start an instance of the demo model with an attacker, nine other tenants and an operator."""
    keys = {name: make_api_key() for name in (ATTACKER, *POLITE, "operator")}
    operator_key, operator_digest = keys.pop("operator")
    settings = {
        "model": "demo",
        "engine": engine,
        "replicas": REPLICAS,
        "tenants": [{"name": name, "key_sha256": [digest]} for name, (_, digest) in keys.items()],
        "operator_key_sha256": [operator_digest],
    }
    with tempfile.TemporaryDirectory(prefix="warmpath-hostile-") as directory:
        config = Path(directory) / "settings.yaml"
        config.write_text(yaml.safe_dump(settings))
        config.chmod(0o600)
        with instance("--config", str(config)) as url:
            yield Stage(url, {name: key for name, (key, _) in keys.items()}, operator_key)


async def storm(made: Stage, seconds: float) -> dict[str, Any]:
    """Watch one tenant's small chats for half as long alone, then beside a retry storm."""
    zeta = POLITE[0]

    async def during(part_s: float, first: int) -> list[Result]:
        return await _answered(made, questions(zeta, made.keys[zeta], _small_chat, 0.2, part_s, first))

    await during(WARM_UP_S, 1_000_000)
    alone = _all_served(await during(seconds / 2, 0))
    async with attack("retry_storm", made.target()) as statuses:
        under = await during(seconds, 10_000)
    return {**beside(alone, under), "attacker_statuses": dict(statuses)}


async def neighbours(made: Stage, seconds: float) -> dict[str, Any]:
    """Watch the nine for ``seconds`` alone, and as long beside each attack."""
    await _all_nine(made, await made.question_words(), 2 * SYSTEM_PROMPTS * EVERY_S, 0)
    # At rest the rate is that of a warm-up, without decodes beside it.
    words = await made.question_words()
    alone = _all_served(await _all_nine(made, words, seconds, 10_000))
    under: list[Result] = []
    attacks: dict[str, Any] = {}
    for number, name in enumerate(ATTACKS):
        async with attack(name, made.target()) as statuses:
            seen = await _all_nine(made, words, seconds, (number + 2) * 10_000)
        under += seen
        attacks[name] = {**beside(alone, seen), "attacker_statuses": dict(statuses)}
    return {**beside(alone, under), "question_words": words, "attacks": attacks}


async def _all_nine(made: Stage, words: int, seconds: float, first: int) -> list[Result]:
    shots: list[Shot] = []
    for name in POLITE:
        shots += questions(name, made.keys[name], _long_chats(name, words), EVERY_S, seconds, first)
    return await _answered(made, shots)


async def _answered(made: Stage, shots: Sequence[Shot]) -> list[Result]:
    return await fire(made.url, shots, TIMEOUT_S, lambda: None)


def questions(tenant: str, api_key: str, ask: Ask, every_s: float, seconds: float, first: int = 0) -> list[Shot]:
    """Return a tenant's requests, numbered from ``first`` on, after exponential gaps of ``every_s`` on average."""
    gaps = random.Random(tenant)
    shots: list[Shot] = []
    due_s = 0.0
    while due_s < seconds:
        shots.append(Shot(due_s, CHAT, ask(first + len(shots)), tenant, api_key))
        due_s += gaps.expovariate(1 / every_s)
    return shots


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """Return statuses, the share of answers, their TTFT and hit rate; None where nothing was served."""
    answers = [result.answer for result in results if result.answer is not None]
    ttft_s = [result.ttft_s for result in results if result.answer is not None]
    return {
        "requests": len(results),
        "statuses": dict(Counter(str(result.status) for result in results)),
        "served": len(answers) / len(results) if results else None,
        "ttft_p50_s": percentile(ttft_s, 50) if answers else None,
        "ttft_p99_s": percentile(ttft_s, 99) if answers else None,
        "hit_rate": hit_rate(answers) if answers else None,
    }


def beside(alone: Sequence[Result], under: Sequence[Result]) -> dict[str, Any]:
    """Return the figures without and with an attack, and their ratios."""
    without, attacked = figures(alone), figures(under)

    def ratio(name: str) -> float | None:
        return attacked[name] / without[name] if attacked[name] is not None and without[name] else None

    return {
        "alone": without,
        "under": attacked,
        "ttft_p99_ratio": ratio("ttft_p99_s"),
        "hit_rate_ratio": ratio("hit_rate"),
    }


def _small_chat(number: int) -> dict[str, Any]:
    return _chat(_RULES, f"{number}: {' '.join(random.Random(number).choices(WORDS, k=12))}", 8)


def _long_chats(tenant: str, words: int) -> Ask:
    """Return a tenant's new questions, after its system prompts in turn."""
    systems = [
        " ".join(random.Random(f"{tenant} {number}").choices(WORDS, k=SYSTEM_WORDS)) for number in range(SYSTEM_PROMPTS)
    ]

    def ask(number: int) -> dict[str, Any]:
        question = " ".join(random.Random(f"{tenant} {number}").choices(WORDS, k=words))
        return _chat(systems[number % SYSTEM_PROMPTS], f"{number} {question}", 16)

    return ask


def _chat(system: str, user: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"model": "demo", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def _all_served(alone: list[Result]) -> list[Result]:
    """Return the results without an attack. Raises RuntimeError when requests failed."""
    if not alone or any(result.answer is None for result in alone):
        raise RuntimeError("without any attack requests were not served")
    return alone


def summary(results: dict[str, dict[str, Any]]) -> str:
    """Return a sentence for each scenario."""
    sentences = []
    for name, row in results.items():
        alone, under = row["alone"], row["under"]
        p99_s = "none" if under["ttft_p99_s"] is None else f"{under['ttft_p99_s']:.2f} s"
        sentence = f"{name}: {under['served']:.1%} of the others' requests were answered, p99 TTFT {p99_s} "
        sentence += f"({alone['ttft_p99_s']:.2f} s without an attack), "
        sentence += f"hit rate {row['hit_rate_ratio'] or 0.0:.2f} of that without"
        ratios = ", ".join(
            f"{kind} {found['ttft_p99_ratio'] or 0.0:.2f}" for kind, found in row.get("attacks", {}).items()
        )
        sentences.append(sentence + (f"; p99 TTFT over that without: {ratios}." if ratios else "."))
    return " ".join(sentences)


def main() -> None:
    """Attack, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--engine", choices=("simulated", "torch"), default="simulated")
    parser.add_argument("--scenarios", type=names_of(SCENARIOS), default=",".join(SCENARIOS), help="storm, neighbours")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each attack")
    arguments: argparse.Namespace = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for name in arguments.scenarios:
        print(f"{name}, {arguments.engine} engines", file=sys.stderr, flush=True)
        with stage(arguments.engine) as made:
            scenario = storm if name == "storm" else neighbours
            results[name] = asyncio.run(scenario(made, arguments.seconds))
    write(arguments.json, vars(arguments), results, f"Engines: {arguments.engine}. {summary(results)}")


if __name__ == "__main__":
    main()
