"""Documents for operators and tenants: /v1/cache/state, /v1/cache/explain and /v1/cache/sessions.

None holds a prompt's text. Explain tells the replica that a request would go to now, and why, without sending it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar

import msgspec
from pydantic import Field

from router.background import run_until_done
from router.core import RoutingCore
from router.policies import POLICIES
from router.protocol.samples import Sample
from serve_app.api.json_body import JsonBody, Text64
from serve_app.api.openai.request import parse_chat, parse_completion
from serve_app.api.openai.responses.request import parse_response_request
from serve_app.api.request import GenerateRequest
from serve_app.config.engine import CAPABILITIES
from serve_app.errors import InvalidRequest, Overloaded, WarmpathError
from serve_app.fairness.front_door import FrontDoor
from serve_app.generation.prepare import Preparer
from serve_app.ingress.observe.answer_meter import AnswerMeter
from serve_app.live.replicas import lacking
from serve_app.live.tally import Total
from serve_app.replica.session_gate import MOST_TOLD
from serve_app.tenants import Tenant, Tenants, name_of
from serve_app.tokenization.segments import SegmentCacheStats

_STATES = {"used": "in_use", "cached": "cached", "free": "free"}


def cache_state(
    core: RoutingCore,
    totals: Mapping[str, Total],
    tokenizer: SegmentCacheStats,
    notices: dict[str, list[dict[str, Any]]],
    *,
    model: str,
    engine: str,
) -> dict[str, Any]:
    """Return the document from this ingress' view of the app."""
    state, stats = core.state(), core.stats()
    for replica in state["replicas"]:
        report = stats.get(replica["replica_id"])
        if report is not None:
            replica |= _of_report(report.samples, state["block_size"])
    return {
        "model": model,
        "engine": engine,
        **state,
        "tokenizer_cache": asdict(tokenizer),
        "tenants": {tenant: _of_tenant(*total) for tenant, total in totals.items()},
        "notices": notices,
    }


def _of_tenant(requests: int, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    counts = {"requests": requests, "prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens}
    return {**counts, "hit_rate": round(cached_tokens / prompt_tokens, 4) if prompt_tokens else 0.0}


def _of_report(samples: Sequence[Sample], block_size: int) -> dict[str, Any]:
    """Return a replica's pool in blocks, bytes and tokens from its samples, any of which may be missing."""
    shown: dict[str, Any] = {}
    block_bytes = next((int(value) for name, _, value in samples if name == "warmpath_kv_cache_block_bytes"), 0)
    for name, labels, value in samples:
        label = dict(labels)
        match name:
            case "warmpath_replica_info" if label.get("pid", "").isdecimal():
                shown["pid"] = int(label["pid"])
            case "warmpath_tenant_kv_cache_blocks" if "tenant" in label:
                shown.setdefault("bytes_by_tenant", {})[label["tenant"]] = int(value) * block_bytes
            case "warmpath_kv_cache_blocks" if label.get("state") in _STATES:
                state = _STATES[label["state"]]
                shown[f"blocks_{state}"] = int(value)
                shown[f"bytes_{state}"] = int(value) * block_bytes
            case "warmpath_pinned_blocks":
                shown["blocks_pinned"] = int(value)
                shown["bytes_pinned"] = int(value) * block_bytes
    if "blocks_cached" in shown:
        shown["tokens_cached"] = shown["blocks_cached"] * block_size
    return shown


class ExplainBody(JsonBody):
    """The body of ``POST /v1/cache/explain``: the fields of a chat, a completion or a response, and these."""

    bounded: ClassVar[Mapping[str, int]] = {"messages": 1 << 17, "prompt": 1 << 20, "input": 1 << 17}

    tenant: Text64 = Field(None, description="the tenant of the request; needed if there are several")
    policy: Text64 = Field(None, description="default: all policies, the acting one first")
    messages: Any = Field(None, description="a chat's messages, or:")
    prompt: Any = Field(None, description="a completion's prompt, or:")
    input: Any = Field(None, description="a response's input")


_PARSERS: dict[str, Callable[[bytes], GenerateRequest]] = {
    "messages": parse_chat,
    "prompt": parse_completion,
    "input": parse_response_request,
}
"""The parser for each body's distinguishing field."""


async def explanation(
    body: bytes, core: RoutingCore, preparer: Preparer, tenants: Tenants, front_door: FrontDoor
) -> dict[str, Any]:
    """Return the document for a body; each prompt is explained alone. Raises the errors of the request itself."""
    asked = ExplainBody.parse(body)
    policies = _policies(asked.policy, core.settings.policy)
    tenant = _tenant(asked.tenant, tenants)
    parsers = [parse for field, parse in _PARSERS.items() if getattr(asked, field) is not None]
    if len(parsers) != 1:
        raise InvalidRequest(
            "Send the body of a chat (with messages), of a completion (with prompt) or of a response (with input)."
        )
    wanted = parsers[0](body)
    wanted = replace(wanted, model=tenants.aliases.get(wanted.model, wanted.model))
    generations = await preparer.prepare(wanted, tenant, "explain")
    return {
        "object": "cache.explanation",
        "model": wanted.answering_model,
        "tenant": tenant.name,
        "router_id": core.router_id,
        "policy": core.settings.policy,
        **front_door.outlook(tenant.name),
        "notes": [
            f"{replica_id} goes without {name}: {CAPABILITIES[name].without}."
            for replica_id, report in core.stats().items()
            for name in lacking(report.samples)
            if name in CAPABILITIES
        ],
        "prompts": [
            {"prefix": generation.placement_key.hex(), **core.explain(generation, policies)}
            for generation in generations[:: wanted.n]
        ],
    }


class _Named(msgspec.Struct):
    model: str | None = None
    tenant: str | None = None


def names_in(body: bytes, tenants: Tenants) -> tuple[str | None, Tenant | None]:
    """Return the model and the tenant that a body to explain names, as far as it can be read."""
    try:
        named = msgspec.json.decode(body, type=_Named)
    except (ValueError, RecursionError):
        return None, None
    known = tenants.by_name
    only = next(iter(known.values())) if len(known) == 1 else None
    return named.model, only or known.get(tenants.named(named.tenant or ""))


def _policies(chosen: str | None, acting: str) -> list[str]:
    """Return the policies to explain. The first one orders the replicas; by default it is the acting policy."""
    if chosen is None:
        return [acting, *(policy for policy in POLICIES if policy != acting)]
    if chosen not in POLICIES:
        raise InvalidRequest(f"policy must be one of {', '.join(POLICIES)}.", param="policy")
    return [chosen]


def _tenant(name: str | None, tenants: Tenants) -> Tenant:
    known = tenants.by_name
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    found = None if name is None else known.get(tenants.named(name))
    if found is None:
        demand = f"the tenant of the request, one of {', '.join(map(name_of, known))[:1000]}"
        raise InvalidRequest(f"tenant must be {demand}.", param="tenant")
    return found


TIMEOUT_S = 5.0
FRESH_S = 1.0
"""The lifetime of an answer: repeated requests share it, so no client can keep replicas busy."""


class SharedAnswers:
    """Answers by question, each shared by all who ask within ``FRESH_S``."""

    def __init__(self) -> None:
        self._asked: dict[Hashable, tuple[float, asyncio.Task[dict[str, Any]]]] = {}

    async def of(self, question: Hashable, ask: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
        """Return the answer, of ``ask`` if there is no fresh one. Raises its errors."""
        now_s = time.monotonic()
        self._asked = {
            one: (asked_s, answer)
            for one, (asked_s, answer) in self._asked.items()
            if not answer.done() or now_s - asked_s < FRESH_S
        }
        if question not in self._asked:
            self._asked[question] = now_s, asyncio.create_task(ask())
        return await asyncio.shield(self._asked[question][1])  # other requests wait for it, too

    def forget(self, *questions: Hashable) -> None:
        """Answer these anew."""
        for question in questions:
            self._asked.pop(question, None)


class SessionList:
    """Collects the lists of a model's sessions, and closes some. ``replicas``: calls a method of each."""

    def __init__(self, replicas: Callable[..., Awaitable[list[Any]]]) -> None:
        self._replicas = replicas
        self._lists = SharedAnswers()

    async def of(self, viewer: str | None) -> dict[str, Any]:
        """Return the document for a tenant, or (None) for an operator. Raises Overloaded if a replica is silent."""
        return await self._lists.of(viewer, partial(self._ask, viewer))

    async def close(self, tenant: str, names: Sequence[str]) -> int:
        """End a tenant's sessions of some names (``session_key``); return how many replicas had one that ended now.

        Raises Overloaded if a replica is silent.
        """
        try:
            closed = await self._replicas("close_sessions", tenant, names, timeout_s=TIMEOUT_S)
        except TimeoutError as error:
            raise Overloaded("A replica does not close its sessions; ask again.", retry_after_s=5.0) from error
        self._lists.forget(tenant, None)
        return sum(map(bool, closed))

    async def _ask(self, viewer: str | None) -> dict[str, Any]:
        try:
            reports = await self._replicas("sessions", viewer, timeout_s=TIMEOUT_S)
        except TimeoutError as error:
            raise Overloaded("A replica does not report its sessions; ask again.", retry_after_s=5.0) from error
        rows = [{"replica": report["replica"], **row} for report in reports for row in report["rows"]]
        return {
            "object": "cache.sessions",
            "viewer": "operator" if viewer is None else "tenant",
            "tenant": viewer,
            "replicas": [{name: value for name, value in report.items() if name != "rows"} for report in reports],
            "sessions": sorted(rows, key=lambda row: float(row["idle_s"]))[:MOST_TOLD],
        }


MOST_FINAL, FINAL_PAUSE_S = 1000, 0.2
"""Names of one tenant that wait to be closed, and the time between two rounds: many ends cost few calls."""


class FinalSessions:
    """Closes the named sessions whose clients called an answer the last one, everywhere, after that answer.

    ``close``: ends a tenant's sessions of some names.
    """

    def __init__(self, close: Callable[[str, Sequence[str]], Awaitable[object]]) -> None:
        self._close = close
        self._names: dict[str, dict[str, None]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def ended(self, answer: AnswerMeter, _: WarmpathError | None) -> None:
        """Note the end of an answer."""
        last = answer.generations[0]
        if not last.final or not last.session:
            return
        if last.tenant not in self._names:
            self._names[last.tenant] = {}
            self._tasks[last.tenant] = run_until_done(partial(self._run, last.tenant))
        names = self._names[last.tenant]
        if len(names) < MOST_FINAL:  # beyond, sessions end as those of other clients do
            names[last.session] = None

    async def _run(self, tenant: str) -> None:
        while names := list(self._names[tenant]):
            self._names[tenant].clear()
            with suppress(Overloaded):
                await self._close(tenant, names)
            await asyncio.sleep(FINAL_PAUSE_S)
        del self._names[tenant], self._tasks[tenant]
