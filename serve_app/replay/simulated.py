"""A file simulated: with several setups side by side, or with rules of autoscaling; what came out, as one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from router.settings import DEFAULT_POLICY, POLICY_NAMES
from serve_app.checkpoints.kv_planner import kv_room
from serve_app.checkpoints.sources import model_config
from serve_app.engine.runner.kv_size import dtype_bytes
from serve_app.replay.cluster import ReplayCluster
from serve_app.replay.forked import forked
from serve_app.replay.outcome import curves_of, figures_of
from serve_app.replay.prompts import ModelTraffic, answers_found, answers_of
from serve_app.replay.rates import card_rates, recorded_rates, with_rates
from serve_app.replay.search import FIXED, OURS, RUNS, SCALING_RULES, ScalingGoal, Search, Tried, search
from serve_app.replay.setup import CacheTier, Rates, Setup
from serve_app.replay.verdict import of_rules, of_setups, of_shadow, of_truth, settings_of
from serve_app.traffic.record import RecordedModel
from serve_app.traffic.workload import Workload, reusable_tokens

AGAIN = "recorded, simulated"
"""The row that simulates what was recorded, with its policy and replicas: it shows how far to trust the others."""
AGAIN_RUNS, FEW_REQUESTS = 5, 20_000
"""A recorded run of few requests hangs on milliseconds: it is simulated so often, with arrivals shifted at random."""
SHIFT_S = 0.005
MEANS = ("within_target", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "hit_rate")

Told = Callable[[int], object]
"""Hears how many requests, or runs, are simulated."""


def unlimited_hit_rate(traffic: ModelTraffic) -> float:
    """Return the part of all prompt tokens that one cache without a limit would serve, answers not counted."""
    sizes = np.asarray(traffic.sizes, np.int64)
    found = reusable_tokens(traffic.prompt_tokens, traffic.paths, traffic.path_start, sizes, traffic.block_tokens)
    total = int(traffic.prompt_tokens.sum(dtype=np.int64))
    return int(found.sum()) / total if total else 0.0


def model_traffic(file: Workload, chosen: npt.NDArray[np.bool_]) -> ModelTraffic:
    """Return the chosen requests of a file."""
    places = np.flatnonzero(chosen)
    starts, paths = file.path_start, file.paths
    lengths = (starts[1:] - starts[:-1])[places]
    path_start = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    if len(places) < len(chosen):
        offsets = np.repeat(starts[places] - path_start[:-1], lengths)
        paths = paths[np.arange(path_start[-1]) + offsets]
    sizes = file.sizes.tolist()
    prompt_tokens, output_tokens = file.prompt_tokens[places], file.output_tokens[places]
    grown = answers_of(prompt_tokens, output_tokens, paths, path_start, sizes, file.block_tokens)
    return ModelTraffic(
        file.block_tokens, file.arrival_s[places], prompt_tokens, output_tokens, file.tenant[places], paths,
        path_start, sizes, *grown,
    )  # fmt: skip


def shifted(traffic: ModelTraffic, seed: int) -> ModelTraffic:
    """Return the same requests, each up to ``SHIFT_S`` later or earlier, in the same order."""
    moves = np.random.default_rng(seed).uniform(-SHIFT_S, SHIFT_S, len(traffic))
    return replace(traffic, arrival_s=np.maximum.accumulate(np.maximum(traffic.arrival_s + moves, 0.0)))


def side_by_side(
    traffic: ModelTraffic, setups: Sequence[Setup], target_ttft_s: float, told: Told, processes: int = 0
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return a row and curves for each setup; of several ``runs`` the means, and the first one's curves."""

    def one(setup: Setup, progress: Callable[[int], object]) -> tuple[dict[str, Any], dict[str, Any]]:
        runs = [traffic, *(shifted(traffic, seed) for seed in range(1, setup.runs))]
        results = [ReplayCluster(each, setup, progress=progress).run() for each in runs]
        rows = [figures_of(each, result, target_ttft_s) for each, result in zip(runs, results, strict=True)]
        mean = {name: float(np.mean([row[name] for row in rows])) for name in MEANS}
        return {**rows[0], **(mean if setup.runs > 1 else {})}, curves_of(traffic, results[0])

    found = forked([partial(one, setup) for setup in setups], lambda done: told(sum(done)), processes)
    rows = [{"name": setup.name, "policy": setup.policy, **row} for setup, (row, _) in zip(setups, found, strict=True)]
    return rows, {setup.name: curves for setup, (_, curves) in zip(setups, found, strict=True)}


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rules side by side. ``part``: of the requests within the target, as asked, or as many as can be."""

    part: float
    rows: list[dict[str, Any]]
    curves: dict[str, dict[str, Any]]
    best: dict[str, Tried]


def scaled(
    traffic: ModelTraffic, setup: Setup, goal: ScalingGoal, rules: Sequence[str], told: Told, processes: int = 0
) -> Scaled:
    """Return each rule's cheapest run that meets the goal, or its nearest; ours without copies of KV, too."""
    searched = Search(traffic, setup, goal)
    reachable = searched.reachable()
    if reachable < goal.part:
        goal = searched.goal = replace(goal, part=reachable * OF_REACHABLE)
    found = search(searched, rules, lambda done: told(sum(done)), processes)
    best = {name: tried[0] for name, tried in found.items()}
    shown = dict(best)
    if OURS in best and setup.rates.pull_tokens_per_s and (setup.warm_join or setup.hand_over):
        bare = replace(setup, warm_join=False, hand_over=False)
        shown[f"{OURS}, no copies"] = Search(traffic, bare, goal).run(OURS, best[OURS].setting)
    rows = [
        {"name": name, "setting": one.setting, "meets": one.figures["within_target"] >= goal.part, **one.figures}
        for name, one in shown.items()
    ]
    return Scaled(goal.part, rows, {name: curves_of(traffic, one.result) for name, one in shown.items()}, best)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """What to simulate, as on the command line. Lists stand side by side; empty ones mean what the file tells."""

    autoscaling: bool = False
    ttft_s: float = 2.0
    part: float = 0.99
    policies: tuple[str, ...] = (DEFAULT_POLICY,)
    replicas: tuple[int, ...] = ()
    pool_tokens: tuple[int, ...] = ()
    host_tokens: tuple[int, ...] = ()
    host_rate: float = 200_000.0
    rules: tuple[str, ...] = ()
    least: int = 1
    most: int | None = None
    first: int | None = None
    start_s: float = 60.0
    copies: bool = True
    card: str = ""
    cards: int = 1
    model: str = ""
    dtype: str = "bfloat16"
    prefill_rate: float | None = None
    decode_step_s: float | None = None
    pull_rate: float | None = None
    price: float | None = None
    processes: int = 0

    def __post_init__(self) -> None:
        for name in self.policies:
            if name not in POLICY_NAMES:
                raise ValueError(f"--policies: there is no {name}; known: {', '.join(POLICY_NAMES)}")
        for name in self.rules:
            if name not in SCALING_RULES:
                raise ValueError(f"--rules: there is no {name}; known: {', '.join(SCALING_RULES)}")


MOST_REPLICAS = 400
OF_REACHABLE = 0.99
"""What a search aims at of what is reachable, where the goal is not."""
DEFAULT_POOL_TOKENS = 400_000
"""Of a replica, where neither the file nor a card tells."""


Curves = dict[str, dict[str, Any]]


class ModelReplay:
    """One model's requests, and what to simulate with them. Raises ValueError where rates are missing."""

    def __init__(self, workload: Workload, model: str, chosen: npt.NDArray[np.bool_], plan: ReplayPlan) -> None:
        self._plan, self._workload, self._chosen = plan, workload, chosen
        self._facts = workload.facts.get(model) or RecordedModel()
        self._model = model
        self._shadow = workload.shadows.get(model)
        self.warnings: list[str] = []
        self.traffic = model_traffic(workload, chosen)
        rates, pool_tokens = self._rates()
        if plan.pull_rate is not None:
            rates = replace(rates, pull_tokens_per_s=plan.pull_rate)
        self.setup = Setup(
            model,
            rates,
            pool_tokens=plan.pool_tokens[0] if plan.pool_tokens else pool_tokens,
            tiers=self._tiers(plan.host_tokens[0]) if plan.host_tokens else (),
            start_s=plan.start_s,
            warm_join=plan.copies and bool(self._facts.settings.get("prewarm", True)),
            hand_over=plan.copies and bool(self._facts.settings.get("handover", True)),
            answers_cached=answers_found(self.traffic, workload.cached_tokens[chosen]),
        )
        self.recorded = self._recorded()
        self._changes = [each for each in workload.changes if each.model in ("", model)]
        self.sizes = [(each.at_s, len(each.replicas)) for each in self._changes]

    def as_recorded(self) -> Setup | None:
        """Return the setup of the recorded run, with its changes of replicas; None if the file tells none."""
        if self.recorded is None or self.recorded["hit_rate"] is None or not (self._facts.replicas or self.sizes):
            return None
        before = [count for at_s, count in self.sizes if at_s <= 0.0]
        first = before[-1] if before else self._facts.replicas or self.sizes[0][1]
        policy = self._facts.policy if self._facts.policy in POLICY_NAMES else DEFAULT_POLICY
        return replace(
            self.setup,
            name=AGAIN,
            replicas=first,
            policy=policy,
            pool_tokens=self._facts.pool_tokens or self.setup.pool_tokens,
            changes=tuple((at_s, count) for at_s, count in self.sizes if at_s > 0.0),
            served_by=self._served_by(),
            runs=AGAIN_RUNS if len(self.traffic) <= FEW_REQUESTS else 1,
        )

    def _served_by(self) -> tuple[int, ...]:
        """Return by request its replica's number, counted as they come; one in the place of another has its number."""
        numbers: dict[int, int] = {}
        running: set[int] = set()
        for change in self._changes:
            gone = [numbers[one] for one in sorted(running - set(change.replicas))]
            for one in change.replicas:
                if one not in numbers:
                    numbers[one] = gone.pop() if gone else max(numbers.values(), default=-1) + 1
            running = set(change.replicas)
        return tuple(numbers.get(one, -1) for one in self._workload.replica[self._chosen].tolist())

    def _usual(self) -> int:
        """Return the replicas that the file had for the longest time, 0 if it does not tell."""
        ends = [at_s for at_s, _ in self.sizes[1:]] + [float(self.traffic.arrival_s[-1])]
        spans: dict[int, float] = {}
        for (at_s, count), end_s in zip(self.sizes, ends, strict=False):
            spans[count] = spans.get(count, 0.0) + max(end_s - max(at_s, 0.0), 0.0)
        return max(spans, key=lambda count: spans[count], default=self._facts.replicas)

    def _rates(self) -> tuple[Rates, int]:
        plan, facts, chosen, file = self._plan, self._facts, self._chosen, self._workload
        pool_tokens = facts.pool_tokens or DEFAULT_POOL_TOKENS
        if plan.card:
            if not plan.model:
                raise ValueError("--card needs --model, whose size sets the rates")
            config = model_config(plan.model)
            room = kv_room(config, plan.dtype, 1 << 60)
            rates, pool_tokens = card_rates(
                plan.card, room.weights_bytes, dtype_bytes(plan.dtype), room.bytes_per_token, plan.cards
            )
            return with_rates(rates, plan.prefill_rate, plan.decode_step_s), pool_tokens
        uncached = file.prompt_tokens[chosen] - np.maximum(file.cached_tokens[chosen], 0)
        recorded = recorded_rates(
            facts, uncached, file.ttft_s[chosen], file.output_tokens[chosen], file.duration_s[chosen]
        )
        if recorded is None:
            if plan.prefill_rate is None:
                raise ValueError(
                    "the file tells no rates: give --card and --model, or --prefill-rate (prompt tokens a second of a "
                    "replica) and --decode-step-ms"
                )
            recorded = Rates(plan.prefill_rate)
        if not facts.pool_tokens and not plan.pool_tokens:
            self.warnings.append(
                f"the file does not tell the size of the KV pool: {DEFAULT_POOL_TOKENS:,} tokens a replica are "
                "assumed; --pool-tokens sets it"
            )
        return with_rates(recorded, plan.prefill_rate, plan.decode_step_s), pool_tokens

    def _tiers(self, tokens: int) -> tuple[CacheTier, ...]:
        return (CacheTier("host", tokens, self._plan.host_rate),) if tokens else ()

    def _recorded(self) -> dict[str, Any] | None:
        """Return what the file itself tells of hits and times, or None."""
        file, chosen = self._workload, self._chosen
        times = file.ttft_s[chosen]
        times = times[~np.isnan(times)].astype(np.float64)
        if not len(times):
            return None
        cached, prompts = file.cached_tokens[chosen], file.prompt_tokens[chosen].astype(np.int64)
        known = cached >= 0
        p50_s, p90_s, p99_s = np.percentile(times, [50, 90, 99]).tolist()
        return {
            "name": "recorded",
            "model": self._model,
            "requests": len(prompts),
            "within_target": float(np.mean(times <= self._plan.ttft_s)),
            "ttft_mean_s": float(times.mean()),
            "ttft_p50_s": p50_s,
            "ttft_p90_s": p90_s,
            "ttft_p99_s": p99_s,
            "hit_rate": float(cached[known].sum() / prompts[known].sum()) if known.any() else None,
        }

    def run(self, told: Callable[[str, int, int], object]) -> tuple[list[dict[str, Any]], Curves, list[str], str]:
        """Return rows, curves, the verdict's sentences and settings."""
        return self._scaled(told) if self._plan.autoscaling else self._side_by_side(told)

    def _side_by_side(self, told: Callable[[str, int, int], object]) -> tuple[list[Any], Curves, list[str], str]:
        plan = self._plan
        setups = self._setups()
        again = self.as_recorded()
        if again is not None:
            setups = [again, *setups]
        total = len(setups) * len(self.traffic)
        rows, curves = side_by_side(
            self.traffic, setups, plan.ttft_s, lambda done: told(f"simulating {self._model}", done, total),
            plan.processes,
        )  # fmt: skip
        for row, setup in zip(rows, setups, strict=True):
            row |= {"replicas": setup.replicas, "pool_tokens": setup.pool_tokens}
        verdict = [] if again is None or self.recorded is None else of_truth(self.recorded, rows[0])
        compared = [row for row in rows if row["name"] != AGAIN]
        if self._shadow is not None:
            verdict += of_shadow(self._shadow, compared)
        verdict += of_setups(compared, unlimited_hit_rate(self.traffic), plan.ttft_s, plan.part)
        meets = [row for row in compared if row["within_target"] >= plan.part]
        chosen = min(meets, key=lambda row: (row["replica_hours"], row["ttft_mean_s"]), default=None)
        for row in rows:
            row["chosen"] = row is chosen
        return rows, curves, verdict, settings_of(None, chosen)

    def _setups(self) -> list[Setup]:
        """Return the setups that stand side by side, each with a name that says what is its own."""
        plan, first = self._plan, self.setup
        replicas = plan.replicas or (self._usual() or self._enough(),)
        pools, hosts = plan.pool_tokens or (first.pool_tokens,), plan.host_tokens or (0,)
        setups = []
        policies = plan.policies
        if self._shadow is not None and self._shadow.policy in POLICY_NAMES and self._shadow.policy not in policies:
            policies = (*policies, self._shadow.policy)
        for policy, count, pool, host in product(policies, replicas, pools, hosts):
            name = policy + f" x{count}" * (len(replicas) > 1)
            name += f" {pool:,}" * (len(pools) > 1) + f" +{host:,} host" * (len(hosts) > 1)
            setups.append(
                replace(first, name=name, policy=policy, replicas=count, pool_tokens=pool, tiers=self._tiers(host))
            )
        return setups

    def _enough(self) -> int:
        """Return the fewest replicas that give the goal."""
        tried = Search(self.traffic, self.setup, self._goal()).cheapest(FIXED)
        return max(round(tried[0].setting), 1)

    def _goal(self) -> ScalingGoal:
        plan = self._plan
        return ScalingGoal(plan.ttft_s, plan.part, plan.least, plan.most or self._most(), plan.first)

    def _most(self) -> int:
        """Return more replicas than the busiest minutes keep busy."""
        rates, traffic = self.setup.rates, self.traffic
        place = (traffic.arrival_s // 120.0).astype(np.int64)
        work_s = traffic.prompt_tokens / rates.prefill_tokens_per_s + traffic.output_tokens * rates.decode_each_s
        busy = np.bincount(place, work_s) / 120.0 if len(place) else np.zeros(1)
        return max(2, min(MOST_REPLICAS, ceil(2.0 * float(busy.max()) + 2.0)))

    def _scaled(self, told: Callable[[str, int, int], object]) -> tuple[list[Any], Curves, list[str], str]:
        plan = self._plan
        rules = plan.rules or SCALING_RULES
        total = len(rules) * RUNS
        found = scaled(
            self.traffic, self.setup, self._goal(), rules, lambda done: told(f"simulating {self._model}", done, total),
            plan.processes,
        )  # fmt: skip
        if found.part < plan.part:
            self.warnings.append(
                f"{plan.part:.1%} of the requests within {plan.ttft_s:g} s cannot be: the others' own prompts take "
                f"longer, however many replicas there are. The search aims at {found.part:.1%}; a longer "
                "--ttft or a faster card helps"
            )
        for row in found.rows:
            row["chosen"] = row["name"] == OURS and row["meets"]
        verdict = of_rules(found.best, plan.ttft_s, found.part, plan.price)
        return found.rows, found.curves, verdict, settings_of(found.best.get(OURS), None)


def _traffic_told(workload: Workload) -> dict[str, Any]:
    requests = len(workload.arrival_s)
    return {
        "requests": requests,
        "refused": workload.refused,
        "span_s": float(workload.arrival_s[-1]) if requests else 0.0,
        "tenants": len(workload.tenants),
        "models": list(workload.models),
        "prompt_tokens": int(workload.prompt_tokens.astype(np.int64).sum()),
        "output_tokens": int(workload.output_tokens.astype(np.int64).sum()),
        "block_tokens": workload.block_tokens,
    }


def replay_report(workload: Workload, plan: ReplayPlan, told: Callable[[str, int, int], object]) -> dict[str, Any]:
    """Simulate each model of a file; return the report. ``told``: a name, what is done of it, and all of it."""
    report: dict[str, Any] = {
        "title": "Replay of recorded traffic, simulated",
        "simulated": True,
        "warnings": list(workload.warnings),
        "target_ttft_s": plan.ttft_s,
        "price_per_hour": plan.price,
        "rows": [],
        "recorded": None,
        "curves": {},
        "verdict": [],
        "settings": "",
        "rates": {},
        "traffic": _traffic_told(workload),
    }
    several = len(workload.models) > 1
    for index, model in enumerate(workload.models):
        chosen = workload.model == index
        if not chosen.any():
            continue
        part = ModelReplay(workload, model, chosen, plan)
        rows, curves, verdict, settings = part.run(told)
        prefix = f"{model}: " if several else ""
        report["rates"][model] = {
            name: value for name, value in asdict(part.setup.rates).items() if value < float("inf")
        }
        report["rows"] += [{"model": model, **row} for row in rows]
        report["curves"] |= {prefix + name: each for name, each in curves.items()}
        report["verdict"] += [prefix + sentence for sentence in verdict]
        report["settings"] += f"# {model}\n{settings}" if several else settings
        report["warnings"] += [prefix + warning for warning in part.warnings]
        if part.recorded is not None:
            report["recorded"] = [*(report["recorded"] or ()), part.recorded]
    return report
