"""A replica's seat at the servers: it takes one that no other replica has, tries it, follows its KV events, looks
whether it lives, and gives it up when it is no longer listed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import aiohttp

from router.background import run_in_background
from router.protocol.block_hash import HASH_BYTES
from router.vllm_events.far_engine import SILENT_S, FarEngine
from serve_app.config.workers import Worker
from serve_app.engine.protocol import AdapterSpec, Clock, EngineRequest, EventSink
from serve_app.engine.remote.adapters import AdapterLoads
from serve_app.engine.remote.answers import Part
from serve_app.engine.remote.asking import parts_of
from serve_app.engine.remote.dialect import WorkerFacts
from serve_app.engine.remote.lists import WorkerLists
from serve_app.engine.remote.reading import WorkerHttp
from serve_app.engine.remote.servers import Unfit, check_model, facts_of, requests_there, tokenizer_of
from serve_app.engine.remote.settings import RemoteSettings
from serve_app.engine.remote.trial import try_server

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
NO_WORKER = "no worker is free for this replica"

ClaimWorker = Callable[[Sequence[str], str], str]
"""Returns which of the URLs this replica has now; "" for none. The second one is what it had. Waits."""


def first_of(urls: Sequence[str], mine: str) -> str:
    """Return the worker of a process that is alone."""
    return mine if mine in urls else next(iter(urls), "")


class WorkerSeat:
    """The worker that this replica has, used from one loop. ``facts``: None while it takes no requests.

    ``out``: why it takes none, "" if it does. ``far``: its blocks, by its KV events. ``others``: its running and
    waiting requests, if they are more than ours.
    """

    def __init__(
        self,
        settings: RemoteSettings,
        sink: EventSink,
        clock: Clock,
        open_http: Callable[[str], WorkerHttp],
        own: Callable[[], int],
        left: Callable[[], None],
    ) -> None:
        """``own``: returns the number of our requests there; ``left``: called when the worker takes no more."""
        self.settings = settings
        self.claim: ClaimWorker = first_of
        self.worker: Worker | None = None
        self.facts: WorkerFacts | None = None
        self.listed: list[Worker] = []
        self.out = NO_WORKER
        self.others = (0, 0)
        self.heard_s = 0.0
        self._sink = sink
        self._clock = clock
        self._open_http = open_http
        self._own = own
        self._left = left
        self.far = self._far_engine(0)
        self._looks = asyncio.Event()
        self._attending: asyncio.Task[None] | None = None
        self._lists = WorkerLists()
        self._claiming: asyncio.Future[str] | None = None
        self._untold = ""
        self._priority = False
        self._seen_connections = 0
        self._loaded: dict[str, str] = {}
        """Keys of the adapters that this worker has under their names."""
        self.loads = AdapterLoads(self._loaded)

    @property
    def attended(self) -> bool:
        """Whether anybody looks after the worker."""
        return self._attending is not None and not self._attending.done()

    async def begin(self) -> None:
        """Begin to look for a worker."""
        self._http = self._open_http(self.settings.key)
        self._attending = run_in_background(self._attend)

    def attend_no_more(self) -> None:
        """Take and try no further worker."""
        if self._attending is not None:
            self._attending.cancel()

    async def close(self) -> None:
        """End everything but the worker."""
        await asyncio.to_thread(self.far.stop)
        self._lists.close()
        await self._http.aclose()

    def look_now(self) -> None:
        """Look after the worker at once: a request failed there."""
        self._looks.set()

    def attributes(self) -> dict[str, str | float]:
        """Return what explain and the state of caches show of the worker."""
        worker, facts = self.worker, self.facts
        attributes: dict[str, str | float] = {"worker": worker.url if worker is not None else "none"}
        if facts is not None:
            attributes |= {"server": facts.called, "routed": self._by()}
            if self._untold:
                attributes["cached_tokens"] = f"as predicted: {self._untold}"
        return attributes

    def parts(
        self, worker: Worker, facts: WorkerFacts, request: EngineRequest, *, priority: bool | None = None
    ) -> AsyncIterator[Part]:
        """Send a request, and return its parts. Raises ValueError for what the server does not have.

        ``priority``: whether its order goes with it; None: as the trial showed.
        """
        salt, words = request.root[:HASH_BYTES].hex(), self._bad_words(request)
        body = facts.dialect.body(request, facts, salt, words)
        if request.order and (self._priority if priority is None else priority):
            body["priority"] = request.order

        def heard() -> None:
            self.heard_s = self._clock()

        return parts_of(self._http, worker.url, facts.dialect, body, request, self.settings.vocab_size, heard)

    async def ensure_adapter(self, worker: Worker, facts: WorkerFacts, request: EngineRequest) -> None:
        """Let the server load an adapter that it does not name, or has in an earlier version."""
        spec = AdapterSpec.of_key(request.scope.lora, request.lora_path)
        path = f"{worker.url}{facts.dialect.adapters_at}"
        await self.loads.ensure(self._http, path, spec, self._names_there, self._named)

    def leave(self, why: str) -> None:
        """Take no requests until a worker is fit, and let other replicas continue those here."""
        if self.out != why:
            logger.warning("this replica takes no requests: %s", why)
        far, self.far = self.far, self._far_engine(0, self.far)
        if far.follower is not None:
            far.forget()
            asyncio.get_running_loop().run_in_executor(None, far.stop)
        self.facts, self.out = None, why
        self._loaded.clear()
        self.loads.forget()
        self._left()

    async def _attend(self) -> None:
        missed = 0
        while True:
            self._looks.clear()
            try:
                await self._take()
            except Exception:  # the worker that it has is looked after all the same
                logger.exception("taking a worker failed")
            try:
                if self.worker is not None:
                    missed = await self._look(self.worker, missed)
            except Exception as error:
                logger.exception("looking after a worker failed")
                if self.facts is None:  # no thread may go on that follows a worker half tried
                    self.leave(f"looking after a worker failed: {type(error).__name__}")
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._looks.wait()

    async def _take(self) -> None:
        """Have the worker that is this replica's now; one that it has stays while others' claims are slow to read."""
        self.listed = await self._lists.now(self.settings.workers)
        if self._claiming is None:
            mine = self.worker.url if self.worker is not None else ""
            urls = [worker.url for worker in self.listed]
            self._claiming = asyncio.get_running_loop().run_in_executor(None, self.claim, urls, mine)
        await asyncio.wait({self._claiming}, timeout=CLAIM_S)
        if not self._claiming.done():
            return
        claiming, self._claiming = self._claiming, None
        taken = claiming.result()
        worker = next((each for each in self.listed if each.url == taken), None)
        if worker != self.worker:
            self.leave(NO_WORKER)
            self.worker = worker

    async def _look(self, worker: Worker, missed: int) -> int:
        """Try a worker that is new or was away, or see whether it still lives; return the late answers in a row."""
        if self.facts is None:
            try:
                await self._try(worker)
            except Unfit as error:
                self.leave(str(error))
            return 0
        follower = self.far.follower
        if follower is not None and follower.connections != self._seen_connections:
            self._seen_connections = follower.connections  # it may be another process than before, of another model
            try:
                self.facts = await self._fit_facts(worker)
            except Unfit as error:
                self.leave(str(error))
                return 0
        began_s, dialect = self._clock(), self.facts.dialect
        try:
            async with self._http.ask(f"{worker.url}/health", within=HEALTH_TIMEOUT) as answer:
                lives = answer.status < 500
        except TimeoutError:
            if self.heard_s >= began_s:  # it is late, but sends tokens
                return 0
            if (missed := missed + 1) < MISSED:
                return missed
            lives = False
        except aiohttp.ClientResponseError:
            # What it sent behind an answer without a body, such as a 204, is read as the next one of its connection.
            if (missed := missed + 1) < MISSED:
                return missed
            lives = False
        except (aiohttp.ClientError, OSError):
            lives = False
        if lives:
            running, waiting = await requests_there(self._http, worker.url, dialect, HEALTH_TIMEOUT)
            self.others = (running, waiting) if running + waiting > self._own() else (0, 0)
        else:
            self.leave(f"{worker.url} does not answer")
        return 0

    async def _fit_facts(self, worker: Worker) -> WorkerFacts:
        facts = await facts_of(self._http, worker.url)
        await check_model(self._http, worker.url, facts, self.settings)
        return facts

    async def _try(self, worker: Worker) -> None:
        """Check a worker, follow its events, and send it requests that show what it keeps. Raises Unfit."""
        facts = await self._fit_facts(worker)
        self.far = far = self._far_engine(facts.num_blocks, self.far)
        size = self.settings.block_size
        if facts.dialect.blind:
            far.blind = facts.dialect.blind
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
        self.facts, self.out = facts, ""
        logger.info("%s, %s: requests go there %s", worker.url, facts.called, self._by())

    async def _trial(self, worker: Worker, facts: WorkerFacts) -> None:
        """Send the trial's prompts, and see whether the worker's KV events name their blocks."""

        def send(request: EngineRequest, priority: bool) -> AsyncIterator[Part]:
            return self.parts(worker, facts, request, priority=priority)

        result = await try_server(worker.url, facts, self.settings, send)
        self._priority, self._untold = result.priority, result.untold
        far, follower = self.far, self.far.follower
        if follower is None or not (follower.connected or follower.resent):
            return
        await self._until(lambda: bool(far.pool.count_held(result.chain, 2)) or bool(follower.unsupported))
        if far.pool.count_held(result.chain, 2) or follower.unsupported:
            return
        if follower.batches:
            far.blind = "its KV events tell no salts: update it"
        else:
            far.computed(self._clock() - 2 * SILENT_S)

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

    def _by(self) -> str:
        doubt = self.far.doubt(self._clock())
        return f"by load alone: {doubt}" if doubt else "by its KV events"

    def _bad_words(self, request: EngineRequest) -> list[str]:
        rules = request.sampling.rules
        longer = [list(word) for word in rules.bad_words if len(word) > 1] if rules is not None else []
        if not longer:
            return []
        if not self.settings.tokenizer:
            raise ValueError("bad_words of several tokens need a model with a tokenizer.json")
        return [tokenizer_of(self.settings.tokenizer).decode(word, skip_special_tokens=False) for word in longer]

    def _names_there(self) -> frozenset[str]:
        return self.facts.models if self.facts is not None else frozenset()

    def _named(self, name: str) -> None:
        if self.facts is not None:
            self.facts = replace(self.facts, models=self.facts.models | {name})
