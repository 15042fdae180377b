"""A server that already runs, behind the engine's contract: requests and tokens over HTTP, KV events over ZeroMQ.

One thread with its own loop. The replica has a seat: it takes one of the listed workers that no other replica has,
tries it, and gives it up when it is no longer listed. While no worker answers, load reports say why (``out``).
"""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import numpy as np
from msgspec import structs

from router.background import run_in_background
from router.protocol.block_hash import HASH_BYTES, PrefixScope, extend_chain, hash_blocks
from router.protocol.events import LoadReport, StatsReport
from router.vllm_events.far_engine import SILENT_S, FarEngine
from serve_app.config.engine import CAPABILITIES, ENGINES, Capability
from serve_app.config.workers import Worker
from serve_app.engine.load_mirror import LiveRequest, LoadMirror
from serve_app.engine.protocol import (
    AdapterSpec,
    EngineError,
    EngineOutput,
    EngineRequest,
    ErrorKind,
    EventSink,
    ExternalEngine,
    FinishReason,
    FirstToken,
    OutputSink,
    SamplingParams,
    SaveResult,
    UnknownAdapter,
    prompt_outputs,
)
from serve_app.engine.remote.adapters import AdapterLoads, Names
from serve_app.engine.remote.answers import Busy, Part, WorkerGone
from serve_app.engine.remote.asking import parts_of
from serve_app.engine.remote.lists import WorkerLists
from serve_app.engine.remote.reading import WorkerHttp, shown
from serve_app.engine.remote.servers import (
    Unfit,
    WorkerFacts,
    check_model,
    facts_of,
    openai_body,
    requests_there,
    sglang_body,
    tokenizer_of,
)
from serve_app.engine.remote.settings import RemoteSettings
from serve_app.engine.reports import EngineMeters, Outbox
from serve_app.engine.scheduling.sequence import check_request, possible

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Time between two looks at a worker's health, and at the list of workers."""
CLAIM_S = 2.0
"""How long a look waits to learn which worker it has."""
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
MISSED = 3
"""A worker that is late for so many looks in a row counts as dead; one that refuses connections does at once."""
FOLLOW_S = 2.0
"""How long to wait for a worker's KV events to be heard, and then for those of the trial."""
TRIAL_S = 60.0
"""Most time for the trial, whoever else waits at the worker."""

_LABELS = (("engine", "remote"),)
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
AWAY = "The model's server takes no requests now; send the request again."
BROKEN_OFF = "The model's server broke off this answer; send the request again."
FULL = "The model's server is full; send the request again later."
"""What clients are told, since a server's address and its words are for operators."""

OFF: frozenset[Capability] = frozenset(CAPABILITIES) - ENGINES["remote"].can

ClaimWorker = Callable[[Sequence[str], str], str]
"""Returns which of the URLs this replica has now; "" for none. The second one is what it had. Waits."""


def first_of(urls: Sequence[str], mine: str) -> str:
    """Return the worker of a process that is alone."""
    return mine if mine in urls else next(iter(urls), "")


@dataclass(slots=True, eq=False)
class RemoteRequest(LiveRequest):
    """``unsure_s``: the time of a prefill whose tokens are not known before the end, 0 for others."""

    unsure_s: float = 0.0


class RemoteEngine(ExternalEngine):
    """One server behind one replica."""

    def __init__(
        self, settings: RemoteSettings, event_sink: EventSink, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._sink = event_sink
        self._claim: ClaimWorker = first_of
        self._lock = threading.Lock()
        self._meters = EngineMeters()
        self._load = LoadMirror(settings, self._meters, turns=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote-engine", daemon=True)
        self._outbox = Outbox(lambda: self._loop.call_soon(self._outbox.deliver))
        self._stopping = False
        self._attending: asyncio.Task[None] | None = None
        self._looks = asyncio.Event()
        self._worker: Worker | None = None
        self._workers: list[Worker] = []
        self._facts: WorkerFacts | None = None
        self._out = "no worker is free for this replica"
        self._far = self._far_engine(0)
        self._open_http = WorkerHttp
        self._lists = WorkerLists()
        self._claiming: asyncio.Future[str] | None = None
        self._untold = ""
        self._priority = False
        self._seen_connections = 0
        self._others = (0, 0)
        self._last_first_s = self._heard_s = 0.0
        self._names = Names()
        self._loaded: dict[str, str] = {}
        """Keys of the adapters that this worker has under their names."""
        self._loads = AdapterLoads(self._loaded)

    @property
    def adapters(self) -> Names:
        """The adapters that requests may name."""
        return self._names

    def share(self, claim: ClaimWorker) -> None:
        """Take workers by ``claim``, beside other replicas; call it before ``start``."""
        self._claim = claim

    def set_workers(self, entries: Sequence[str]) -> None:
        """Look for workers there from the next look on."""
        self.settings = replace(self.settings, workers=tuple(entries))

    @property
    def seats(self) -> int:
        """How many replicas the listed workers need."""
        return max(1, len(self._workers))

    def start(self) -> None:
        """Begin to look for a worker."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._begin_attending(), self._loop).result()

    def stop(self) -> None:
        """Leave the worker as it is; unfinished requests get an "error" output."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        if self._thread.ident is not None:
            asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._claim((), self._worker.url if self._worker is not None else "")

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Queue a request. Raises RequestTooLong, QueueFull, UnknownAdapter, EngineError once stopped, ValueError."""
        request, size, facts = possible(request, OFF), self.settings.block_size, self._facts
        limit = self.settings.max_model_len
        check_request(
            request,
            vocab_size=self.settings.vocab_size,
            max_model_len=min(limit, facts.max_model_len or limit) if facts is not None else limit,
            max_blocks=limit,
            block_size=size,
        )
        if request.scope.lora and request.scope.lora not in self.adapters.loaded:
            raise UnknownAdapter(f"{request.scope.lora} is not loaded")
        ids = np.ascontiguousarray(request.token_ids, dtype=np.int32)
        chain = request.block_hashes or extend_chain(request.root, 0, ids, size)
        known = self._far.pool.hit(chain, (len(ids) - 1) // size) * size if request.reads_kv else 0
        with self._lock:
            if self._stopping:
                raise EngineError("the engine is stopped")
            if request.request_id in self._load.live:
                raise ValueError(f"request id {request.request_id!r} is in use")
            self._load.check(request.tenant)
            asked = structs.replace(request, token_ids=ids, block_hashes=chain)
            live = RemoteRequest(asked, sink, {}, self._clock(), len(ids) - known)
            self._load.arrived(live)
        self._loop.call_soon_threadsafe(self._begin, live, known)

    def cancel(self, request_id: str) -> None:
        """Drop a request (any thread): the server notices that its client left. Unknown ids are ignored."""
        with self._lock:
            live = self._load.live.get(request_id)
        if live is not None:
            self._loop.call_soon_threadsafe(lambda: live.task is not None and live.task.cancel())

    def load(self) -> LoadReport:
        """Return the load of this deployment's requests, and the numbers of other clients' requests at the server."""
        with self._lock:
            report = self._load.report(self._clock())
            running, waiting = self._others
        return structs.replace(
            report,
            running_sequences=max(report.running_sequences, running),
            waiting_sequences=max(report.waiting_sequences, waiting),
            attributes=self._attributes(),
            out=self._out,
        )

    def stats(self) -> StatsReport:
        """Return counters and gauges as Prometheus-style samples."""
        with self._lock:
            facts, far = self._facts, self._far
            blocks = facts.num_blocks if facts is not None else 0
            held = far.pool.held_blocks
            gauges = tuple(self._load.gauges(max(blocks, held), held, 0, _LABELS))
        told = "warmpath_worker_predictions_total"
        return StatsReport(
            (
                *self._meters.samples(_LABELS),
                *gauges,
                (told, (*_LABELS, ("result", "right")), float(far.right)),
                (told, (*_LABELS, ("result", "wrong")), float(far.wrong)),
                ("warmpath_worker_up", _LABELS, float(not self._out)),
                ("warmpath_unplaced_kv_blocks_total", _LABELS, float(far.pool.unplaced)),
                ("warmpath_kv_cache_block_tokens", _LABELS, float(self.settings.block_size)),
            )
        )

    def healthy(self) -> bool:
        """Return False once the loop has died. A dead worker is no reason to start another replica."""
        attended = self._attending is not None and not self._attending.done()
        return not self._stopping and self._thread.is_alive() and attended

    def tell_cache(self, *, anew: bool = False) -> None:
        """Send a digest of the pool by the worker's events so far; ``anew``: all its blocks first."""
        follower = self._far.follower
        if follower is not None and not self._out:
            follower.tell(anew=anew)

    def known_blocks(self, block_hashes: bytes, most: int) -> int:
        """Return how many of a chain's first ``most`` blocks are cached, by the worker's last events (any thread)."""
        return self._far.pool.count_held(block_hashes, most)

    def reset_prefix_cache(self, *, tiers: bool = True) -> bool:
        """Return False: the cache is the server's."""
        return False

    # The seat.

    async def _begin_attending(self) -> None:
        self._http = self._open_http(self.settings.key)
        self._attending = run_in_background(self._attend)

    async def _attend(self) -> None:
        missed = 0
        while True:
            self._looks.clear()
            try:
                await self._take_seat()
            except Exception:  # the worker that it has is looked after all the same
                logger.exception("taking a worker failed")
            try:
                if self._worker is not None:
                    missed = await self._look(self._worker, missed)
            except Exception as error:
                logger.exception("looking after a worker failed")
                if self._facts is None:  # no thread may go on that follows a worker half tried
                    self._leave(f"looking after a worker failed: {type(error).__name__}")
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._looks.wait()

    async def _take_seat(self) -> None:
        """Have the worker that is this replica's now; one that it has stays while others' claims are slow to read."""
        self._workers = await self._lists.now(self.settings.workers)
        if self._claiming is None:
            mine = self._worker.url if self._worker is not None else ""
            urls = [worker.url for worker in self._workers]
            self._claiming = self._loop.run_in_executor(None, self._claim, urls, mine)
        await asyncio.wait({self._claiming}, timeout=CLAIM_S)
        if not self._claiming.done():
            return
        claiming, self._claiming = self._claiming, None
        taken = claiming.result()
        worker = next((each for each in self._workers if each.url == taken), None)
        if worker != self._worker:
            self._leave("no worker is free for this replica")
            self._worker = worker

    async def _look(self, worker: Worker, missed: int) -> int:
        """Try a worker that is new or was away, or see whether it still lives; return the late answers in a row."""
        if self._facts is None:
            try:
                await self._try(worker)
            except Unfit as error:
                self._leave(str(error))
            return 0
        follower = self._far.follower
        if follower is not None and follower.connections != self._seen_connections:
            self._seen_connections = follower.connections  # it may be another process than before, of another model
            try:
                facts = await facts_of(self._http, worker.url)
                await check_model(self._http, worker.url, facts, self.settings)
            except Unfit as error:
                self._leave(str(error))
                return 0
            self._facts = facts
        asked_s = self._clock()
        try:
            async with self._http.ask(f"{worker.url}/health", within=HEALTH_TIMEOUT) as answer:
                lives = answer.status < 500
        except TimeoutError:
            if self._heard_s >= asked_s:  # it is late, but sends tokens
                return 0
            if (missed := missed + 1) < MISSED:
                return missed
            lives = False
        except (aiohttp.ClientError, OSError):
            lives = False
        if lives:
            running, waiting = await requests_there(self._http, worker.url, HEALTH_TIMEOUT)
            with self._lock:
                own = len(self._load.live)
                self._others = (running, waiting) if running + waiting > own else (0, 0)
        else:
            self._leave(f"{worker.url} does not answer")
        return 0

    async def _try(self, worker: Worker) -> None:
        """Check a worker, follow its events, and send it requests that show what it keeps. Raises Unfit."""
        facts = await facts_of(self._http, worker.url)
        await check_model(self._http, worker.url, facts, self.settings)
        self._far = far = self._far_engine(facts.num_blocks, self._far)
        size = self.settings.block_size
        if facts.kind == "tensorrt_llm":
            far.blind = "TensorRT-LLM publishes no KV events in this form"
        elif not self.settings.enable_prefix_caching:
            far.blind = "enable_prefix_caching is off"
        elif facts.block_size and facts.block_size % size:
            far.blind = f"its blocks have {facts.block_size} tokens and the routers' {size}: set block_size"
        else:
            far.follow(worker.events, worker.replay)
            await self._until(lambda: far.follower is not None and (far.follower.connected or far.follower.resent))
            self._seen_connections = far.follower.connections if far.follower is not None else 0
        try:
            async with asyncio.timeout(TRIAL_S):
                await self._trial(worker, facts)
        except TimeoutError:
            raise Unfit(f"{worker.url} does not answer a short prompt within {TRIAL_S:g} s") from None
        self._facts, self._out = facts, ""
        logger.info("%s, %s: requests go there %s", worker.url, facts.called, self._by())

    async def _trial(self, worker: Worker, facts: WorkerFacts) -> None:
        """Send a prompt under one salt twice, then under another: a short one of this deployment's own."""
        size = self.settings.block_size
        ids = np.array([secrets.randbelow(max(2, self.settings.vocab_size - 1)) for _ in range(2 * size + 1)], np.int32)
        roots = [secrets.token_bytes(HASH_BYTES) for _ in range(2)]
        told = []
        for root, priority in zip((roots[0], roots[0], roots[1]), (1, 0, 0), strict=True):
            request = EngineRequest(
                request_id="trial",
                token_ids=ids,
                scope=PrefixScope("trial", "", root),
                root=root,
                sampling=SamplingParams(1, temperature=0.0),
                order=priority,
            )
            if priority:
                self._priority = facts.kind == "vllm"
            try:
                parts = [part async for part in self._parts(worker, facts, request)]
            except (WorkerGone, Busy) as error:
                raise Unfit(f"{worker.url} answers no request: {error}") from None
            except ValueError:
                self._priority = False
                try:
                    parts = [part async for part in self._parts(worker, facts, request)]
                except (ValueError, WorkerGone, Busy) as error:
                    raise Unfit(f"{worker.url} refuses a prompt of token ids: {error}") from None
            if not any(part.token_ids for part in parts):
                raise Unfit(f"{worker.url} tells no token ids of its answers; update it")
            told.append(next((part.cached_tokens for part in reversed(parts) if part.cached_tokens is not None), None))
        salted = "cache_salt" in facts.fields or (facts.kind == "vllm" and not facts.fields)
        if self.settings.apart and (told[2] or not (told[1] or salted)):
            raise Unfit(f"{worker.url} ignores cache_salt, so tenants would share its cache: update it")
        self._untold = "" if any(value is not None for value in told) else "its answers tell no cached tokens"
        if self._untold and facts.kind == "vllm":
            self._untold += " (--enable-prompt-tokens-details)"
        follower, chain = self._far.follower, hash_blocks(roots[0], ids, size)
        if follower is None or not (follower.connected or follower.resent):
            return
        await self._until(lambda: bool(self._far.pool.count_held(chain, 2)) or bool(follower.unsupported))
        if self._far.pool.count_held(chain, 2) or follower.unsupported:
            return
        if follower.batches:
            self._far.blind = "its KV events tell no salts: update it"
        else:
            self._far.computed(self._clock() - 2 * SILENT_S)

    async def _until(self, met: Callable[[], bool]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(FOLLOW_S):
                while not met():  # noqa: ASYNC110  # another thread decides
                    await asyncio.sleep(0.01)

    def _far_engine(self, num_blocks: int, before: FarEngine | None = None) -> FarEngine:
        far = FarEngine(self.settings.block_size, num_blocks, self._sink)
        if before is not None:  # counters never fall
            far.right, far.wrong = before.right, before.wrong
        return far

    def _leave(self, why: str) -> None:
        """Take no requests until a worker is fit, and let other replicas continue those here."""
        if self._out != why:
            logger.warning("this replica takes no requests: %s", why)
        far, self._far = self._far, self._far_engine(0, self._far)
        if far.follower is not None:
            far.forget()
            self._loop.run_in_executor(None, far.stop)
        self._facts, self._out = None, why
        self._loaded.clear()
        self._loads.forget()
        with self._lock:
            requests = list(self._load.live.values())
        for live in requests:
            self._end(live, "error", error="unavailable", message=AWAY)
            if live.task is not None:
                live.task.cancel()

    def _by(self) -> str:
        doubt = self._far.doubt(self._clock())
        return f"by load alone: {doubt}" if doubt else "by its KV events"

    def _attributes(self) -> dict[str, str | float]:
        """Return what explain and the state of caches tell of the worker."""
        worker, facts = self._worker, self._facts
        told: dict[str, str | float] = {"worker": worker.url if worker is not None else "none"}
        if facts is not None:
            told |= {"server": facts.called, "routed": self._by()}
            if self._untold:
                told["cached_tokens"] = f"as predicted: {self._untold}"
        return told

    # Requests.

    def _begin(self, live: RemoteRequest, known: int) -> None:
        if not live.ended:
            live.task = self._loop.create_task(self._generate(live, known))
            live.task.add_done_callback(lambda task: self._settle(live, task))

    async def _generate(self, live: RemoteRequest, known: int) -> None:
        worker, facts, far, request = self._worker, self._facts, self._far, live.request
        if worker is None or facts is None:
            self._end(live, "error", error="unavailable", message=AWAY)
            return
        again = 0
        if request.grammar and request.resumed_tokens:
            # The server's grammar cannot begin in the middle: the answer is computed again, with the same seed.
            again = request.resumed_tokens
            kept = len(request.token_ids) - again
            sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens + again)
            request = structs.replace(
                request, token_ids=request.token_ids[:kept], block_hashes=b"", resumed_tokens=0, sampling=sampling
            )
        told, believed = None, not far.doubt(self._clock())
        left_s = live.arrival_s + request.timeout_s - self._clock()
        finish, had = "", 0
        async with asyncio.timeout(None if left_s == float("inf") else left_s):
            if request.scope.lora:
                await self._ensure_adapter(worker, facts, live.request)
            async for part in self._parts(worker, facts, request):
                if part.cached_tokens is not None:
                    told = min(part.cached_tokens, len(request.token_ids))
                finish = part.finish or finish
                ids, logprobs = part.token_ids, part.logprobs
                if had < again and ids:
                    before = live.request.token_ids[len(request.token_ids) + had :].tolist()
                    same = min(len(ids), again - had)
                    if list(ids[:same]) != before[:same]:
                        raise ValueError("a worker was lost in the middle of a constrained answer; send it again")
                    had, ids, logprobs = had + same, ids[same:], logprobs[same:]
                if ids or part.prompt_logprobs:
                    cached = (known if believed else 0) if told is None else told
                    self._take(live, ids, logprobs, part, FirstToken(cached, expected=told is None), believed)
        if not finish:
            raise WorkerGone(f"{worker.url} broke off an answer")
        reason = _FINISH.get(finish)
        if reason is None:
            raise WorkerGone(f"{worker.url} ended an answer with {shown(finish, 40)!r}")
        followed = request.reads_kv and not again and self._far is far
        if told is not None and followed and far.follower is not None:
            far.judge(known, told)
        if followed and len(request.token_ids) - (told or known) >= 2 * self.settings.block_size:
            far.computed(self._clock())
        self._finish(live, reason, told)

    def _parts(self, worker: Worker, facts: WorkerFacts, request: EngineRequest) -> AsyncIterator[Part]:
        """Send a request, and return its parts. Raises ValueError for what the server does not have."""
        salt, words = request.root[:HASH_BYTES].hex(), self._bad_words(request)
        body = (sglang_body if facts.kind == "sglang" else openai_body)(request, facts, salt, words)
        if request.order and self._priority:
            body["priority"] = request.order

        def heard() -> None:
            self._heard_s = self._clock()

        return parts_of(self._http, worker.url, body, request, self.settings.vocab_size, heard)

    def _bad_words(self, request: EngineRequest) -> list[str]:
        rules = request.sampling.rules
        longer = [list(word) for word in rules.bad_words if len(word) > 1] if rules is not None else []
        if not longer:
            return []
        if not self.settings.tokenizer:
            raise ValueError("bad_words of several tokens need a model with a tokenizer.json")
        return [tokenizer_of(self.settings.tokenizer).decode(word, skip_special_tokens=False) for word in longer]

    async def _ensure_adapter(self, worker: Worker, facts: WorkerFacts, request: EngineRequest) -> None:
        """Let the server load an adapter that it does not name, or has in an earlier version."""
        spec = AdapterSpec.of_key(request.scope.lora, request.lora_path)
        path = f"{worker.url}{'' if facts.kind == 'sglang' else '/v1'}"
        await self._loads.ensure(self._http, path, spec, self._names_there, self._named)

    def _names_there(self) -> frozenset[str]:
        return self._facts.models if self._facts is not None else frozenset()

    def _named(self, name: str) -> None:
        if self._facts is not None:
            self._facts = replace(self._facts, models=self._facts.models | {name})

    def _take(
        self,
        live: RemoteRequest,
        ids: tuple[int, ...],
        logprobs: tuple[Any, ...],
        part: Part,
        first: FirstToken,
        believed: bool,
    ) -> None:
        """Pass tokens on, but for a stop token that stays hidden."""
        request, sampling = live.request, live.request.sampling
        for output in prompt_outputs(request.request_id, part.prompt_logprobs):
            self._outbox.add(live.sink, output)
        ids = ids if sampling.max_tokens else ()
        if part.finish == "stop" and ids and ids[-1] not in sampling.shown_stop_token_ids:
            ids = ids[:-1] if ids[-1] in sampling.stop_token_ids else ids
        output = EngineOutput(request.request_id, ids, logprobs[: len(ids)])
        self._meters.generation_tokens += len(ids)
        if not live.begun:
            output.first = self._first(live, first, believed)
        self._outbox.add(live.sink, output)

    def _first(self, live: RemoteRequest, first: FirstToken, believed: bool) -> FirstToken:
        now_s = self._clock()
        begun_s = max(live.arrival_s, self._last_first_s)  # prompts are computed one after the other, more or less
        self._last_first_s = now_s
        self._meters.prefill_time.observe(now_s - live.arrival_s)
        with self._lock:
            self._load.begun(live, first.cached_tokens)
            self._load.stepped(sum(each.begun for each in self._load.live.values()), 0.0, 0, 0.0)
        if first.expected and not believed:
            live.unsure_s = now_s - begun_s
        else:
            self._meters.stepped(live.taken_tokens, now_s - begun_s)
        return replace(first, save=SaveResult("off")) if live.request.saves else first

    def _finish(self, live: RemoteRequest, reason: FinishReason, told: int | None) -> None:
        """End a complete answer; its usage is now known for certain."""
        if live.ended:
            return
        request = live.request
        last = EngineOutput(request.request_id)
        if not live.begun:
            last.first = self._first(live, FirstToken(told or 0), believed=True)
        elif told is not None:
            computed = len(request.token_ids) - told
            if computed != live.taken_tokens:
                last.first = FirstToken(live.taken_tokens - computed, correction=True)
            live.taken_tokens = computed
            if live.unsure_s:
                self._meters.stepped(computed, live.unsure_s)
        if reason == "stop" and not request.sampling.max_tokens:
            reason = "length"
        self._end(live, reason, output=last)

    def _settle(self, live: LiveRequest, task: asyncio.Task[None]) -> None:
        """End a request if its task ended before its answer."""
        error = None if task.cancelled() else task.exception()
        if live.ended:
            return
        if task.cancelled():
            self._end(live, "cancelled")
        elif isinstance(error, TimeoutError):
            self._end(live, "timeout", message="The answer took too long; ask for fewer tokens.")
        elif isinstance(error, WorkerGone | aiohttp.ClientError | OSError):
            logger.warning("request %s leaves its server: %s", live.request.request_id, error)
            self._looks.set()
            self._end(live, "error", error="unavailable", message=BROKEN_OFF)
        elif isinstance(error, Busy):
            self._end(live, "error", error="queue_full", message=FULL)
        elif isinstance(error, ValueError):
            self._end(live, "error", error="invalid", message=str(error))
        else:
            logger.error("a request failed", exc_info=error)
            self._end(live, "error", message="the engine failed this request")

    def _end(
        self,
        live: LiveRequest,
        reason: FinishReason,
        *,
        output: EngineOutput | None = None,
        error: ErrorKind = "failed",
        message: str = "",
    ) -> None:
        """End a request once: release all that it holds, and report its end."""
        if live.ended:
            return
        if live.taken_tokens:
            whole = len(live.request.token_ids)
            self._meters.admitted(live.request.tenant, whole, whole - live.taken_tokens, caching=True)
            self._meters.computed_prompt_tokens += live.taken_tokens
        with self._lock:
            self._load.ended(live)
        self._meters.finished[reason] += 1
        last = output or EngineOutput(live.request.request_id)
        last.end(reason, error, message)
        last.retry_after_s = 1.0 if error == "queue_full" else 0.0
        last.prefilled = live.prefilled
        self._outbox.add(live.sink, last)

    async def _end_all(self) -> None:
        if self._attending is not None:
            self._attending.cancel()
        with self._lock:
            requests = list(self._load.live.values())
        tasks = [live.task for live in requests if live.task is not None]
        for live in requests:
            self._end(live, "error", message="the engine was stopped")
        for task in tasks:
            task.cancel()
        self._outbox.deliver()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._far.stop)
        self._lists.close()
        await self._http.aclose()
