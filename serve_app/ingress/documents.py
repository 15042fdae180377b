"""Documents of an address for routes and other ingresses: samples, tables of tenants, health, explanations."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from router.background import FAILING, LOOPS
from router.protocol.samples import Sample
from serve_app.ingress.address import Address
from serve_app.ingress.model import Model
from serve_app.ingress.observe import metrics as figures
from serve_app.ingress.observe import reports
from serve_app.ingress.observe.tenants import held_tokens, refusals_by_tenant, spent_today, tenant_rows
from serve_app.live.journal import RequestRow, latest
from serve_app.live.tally import WINDOWS_S, Bucket, begin_of, sums_of

TIMEOUT_S = 5
"""For the other ingresses to answer."""


def samples_here(address: Address) -> list[Sample]:
    """Return the samples of this ingress and its routers; those of several models with the model's name."""
    samples: list[Sample] = []
    if address.several:
        samples += [*address.metrics.samples(), *address.hall.samples()]
    for name, model in address.models.items():
        samples += _labelled(address, name, model.samples())
    return [*samples, *LOOPS.samples()]


async def all_samples(address: Address) -> list[Sample]:
    """Return the samples of every ingress and every replica."""
    samples: list[Sample] = []
    for name, model in address.models.items():
        samples += _labelled(address, name, await model.replica_samples())
    ingresses = await address.broadcast.ingresses("named_samples", timeout_s=TIMEOUT_S)
    for ingress, more in ingresses or [(address.name, samples_here(address))]:
        samples += figures.with_label(more, "ingress", ingress)
    return samples


def _labelled(address: Address, name: str, samples: list[Sample]) -> list[Sample]:
    return figures.with_label(samples, "model", name) if address.several else samples


async def models_health(address: Address) -> dict[str, Any]:
    """Return each model's status and number of replicas, and why it has none."""
    rows: dict[str, Any] = {name: {"status": "down", "replicas": 0, "why": why} for name, why in address.down.items()}
    for name, model in address.models.items():
        replicas = len(model.core.replica_ids)
        rows[name] = {"status": "ok" if address.ready(model) else "starting", "replicas": replicas}
        if not replicas and (why := await model.status()):
            rows[name]["why"] = why
    return rows


def failing_loops(address: Address) -> dict[str, str]:
    """Return the loops of this ingress and of the replicas that failed lately: a name, and what is known of it."""
    failing = LOOPS.failing()
    for model in address.models.values():
        for replica_id, report in model.core.stats().items():
            for name, labels, value in report.samples:
                if value and name == FAILING:
                    failing[f"{replica_id}: {labels[0][1]}"] = "see the replica's log"
    return failing


def tenant_counts(address: Address, windows_s: Sequence[int]) -> list[dict[str, Bucket]]:
    """Return what was counted at this ingress in spans up to now, of all models, by tenant."""
    tallies = {id(tally): tally for tally in (address.metrics, *(model.metrics for model in address.models.values()))}
    now_s = time.time()
    counts: list[dict[str, Bucket]] = []
    for window_s in windows_s:
        sums: dict[str, Bucket] = {}
        for tally in tallies.values():
            for tenant, bucket in sums_of(tally.rings, now_s, window_s).items():
                sums.setdefault(tenant, Counter()).update(bucket)
        counts.append(sums)
    return counts


async def tenant_table(address: Address, viewer: str | None, window_s: int) -> dict[str, Any]:
    """Return what tenants send, wait for and hold; of one tenant or (None) of all. Readers at once share it."""
    return await address.tables.of((viewer, window_s), lambda: _tenant_table(address, viewer, window_s))


async def _tenant_table(address: Address, viewer: str | None, window_s: int) -> dict[str, Any]:
    windows_s, now_s = (window_s, WINDOWS_S[0]), time.time()
    answers = await address.broadcast.ingresses("tenant_counts", windows_s, timeout_s=TIMEOUT_S)
    counts, minute = zip(*(answers or [tenant_counts(address, windows_s)]), strict=True)
    today = datetime.now(UTC).date().isoformat()
    usage = await address.usage.everywhere(today, today, viewer)
    prices = address.budgets.prices
    spent = spent_today(usage, prices) if prices else {}
    budgets = {one["tenant"]: one for one in await address.budgets.told(viewer)}
    pools = [held_tokens([*_reports(model)], model.config.block_size) for model in address.models.values()]
    owned, pool = Counter[str](), sum(tokens for _, tokens in pools)
    for by_tenant, _ in pools:
        owned.update(by_tenant)
    names = address.tenants.by_name
    begin_s = begin_of(now_s, window_s)
    rows = tenant_rows(counts, names if viewer is None else [viewer], now_s - begin_s, viewer)
    for row in rows:
        tenant = row["tenant"]
        if pool:
            row["kv_tokens"] = owned[tenant]
            if tenant in names:
                row["kv_share_tokens"] = int(pool * address.shares.fraction(tenant, among=names))
        row |= {name: by_name[tenant] for name, by_name in (("budget", budgets), ("today", spent)) if tenant in by_name}
    of_operators = {"kv": {"pool_tokens": pool, "held_tokens": dict(owned)}} if viewer is None and pool else {}
    return {
        "object": "tenants.stats",
        "viewer": "operator" if viewer is None else "tenant",
        "at_s": round(now_s, 3),
        "window_s": window_s,
        "since_s": begin_s,
        "data": rows,
        "refusals": refusals_by_tenant(minute, viewer),
        **of_operators,
    }


def _reports(model: Model) -> list[Sequence[Sample]]:
    """Return the latest samples of each replica."""
    return [report.samples for report in model.core.stats().values()]


async def tenant_requests(address: Address, tenant: str, *, operator: bool) -> list[RequestRow]:
    """Return a tenant's latest requests at all ingresses, newest first."""
    answers = await address.broadcast.ingresses("tenant_requests", tenant, timeout_s=TIMEOUT_S)
    return latest([row for rows in answers or [address.journal.of(tenant)] for row in rows], operator=operator)


async def explanation(address: Address, body: bytes) -> dict[str, Any]:
    """Return where the request in a body would go now. Raises the errors of ``reports.explanation``."""
    model = address.explained(*reports.names_in(body, address.tenants))
    return await reports.explanation(body, model.core, model.preparer, address.tenants, model.front_door)


async def cache_state(model: Model) -> dict[str, Any]:
    """Return the content of the caches, as this ingress' router sees it."""
    notices = await asyncio.to_thread(model.broadcast.notices)
    return reports.cache_state(
        model.core,
        model.metrics.totals(),
        model.tokenizer.stats(),
        notices,
        model=model.config.model_name,
        engine=model.config.engine,
    )
