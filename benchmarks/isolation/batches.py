"""A batch of shuffled requests over many prompts beside interactive ones: the tokens computed, and who waits.

Simulated: replicas are the real scheduler and prefix cache with a cost model, in virtual time. Router, order of the
batch's lines and the rule for their start are the real code. "file order" starts the same lines in the file's order.
"""

import asyncio
import selectors
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import numpy as np
from msgspec import structs

from benchmarks.common.harness import Findings, Options, benchmark, flag, progress
from benchmarks.common.report import percentile, spread
from router.core import RoutingCore
from router.protocol.block_hash import PrefixScope, TokenArray
from router.settings import RouterSettings
from serve_app.batch.order import LANES, LineRunner, as_given, beginnings, grouped
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.protocol import EngineRequest, SamplingParams
from serve_app.engine.reports import LoadReports, PrefillRate
from serve_app.engine.runner.simulated_runner import CostModel
from serve_app.engine.scheduling.scheduler import Scheduler, yields
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.shares import Shares

SECRET = b"batches benchmark"
FLEX = 2**32


@dataclass(frozen=True, slots=True)
class BatchWorkload:
    """A batch of ``lines`` over ``prompts``, in a pool for ``pool_prompts`` on each replica; interactive chats."""

    replicas: int = 2
    prompts: int = 50
    prompt_tokens: int = 2048
    lines: int = 2000
    question_tokens: int = 48
    answer_tokens: int = 32
    pool_prompts: int = 10
    max_num_seqs: int = 64
    prefill_tokens_per_s: float = 10_000.0
    chats_per_s: float = 2.0
    chat_prompts: int = 4
    chat_tokens: int = 1024
    chat_answer_tokens: int = 64
    seed: int = 0

    @property
    def num_blocks(self) -> int:
        """The blocks of a replica's pool."""
        return self.pool_prompts * self.prompt_tokens // 16

    @property
    def least_tokens(self) -> int:
        """The tokens that a batch needs if each prompt is computed once, by whole blocks."""
        return self.prompts * self.prompt_tokens + self.lines * self.question_tokens


class _Waits(selectors.SelectSelector):
    """Nothing to wait for but the time, which passes at once."""

    now_s: float = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let the time pass."""
        self.now_s += max(0.0, timeout or 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        self.waits: _Waits = _Waits()
        super().__init__(self.waits)

    def time(self) -> float:
        """Return the virtual time."""
        now_s: float = self.waits.now_s
        return now_s


@dataclass(eq=False)
class BatchReplica:
    """One replica: it computes steps while it has work."""

    name: str
    workload: BatchWorkload
    core: RoutingCore
    clock: VirtualLoop
    computed: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    ends: dict[str, asyncio.Future[float]] = field(default_factory=dict)
    """By request: its time to first token, at its end."""
    first_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = EngineSettings(num_blocks=self.workload.num_blocks, max_num_seqs=self.workload.max_num_seqs)
        self.cache = PrefixCache(settings.num_blocks, settings.block_size, clock=self.clock.time)
        self.scheduler = Scheduler(settings, self.cache)
        self.cost = CostModel(prefill_tokens_per_s=self.workload.prefill_tokens_per_s)
        rate = PrefillRate(self.cost.prefill_tokens_per_s)
        self.reports = LoadReports(self.workload.max_num_seqs, 256, lambda: rate)

    async def answer(self, request: EngineRequest) -> float:
        """Answer a request; return its time to first token."""
        sequence = SequenceState(request, lambda _: None, request.block_hashes, self.clock.time())
        self.reports.arrived(request.decision)
        self.scheduler.add(sequence)
        end = self.ends[request.request_id] = asyncio.get_running_loop().create_future()
        self.news.set()
        ttft_s: float = await end
        return ttft_s

    async def run(self) -> None:
        """Compute."""
        pace = self.cost.prefill_tokens_per_s, self.cost.decode_base_s, self.cost.decode_per_sequence_s
        while True:
            chosen = self.scheduler.schedule(*pace)
            if not chosen and not self.scheduler.preempted:
                self.news.clear()
                self.report()
                await self.news.wait()
                continue
            segments = [item.sequence.segment(item.tokens) for item in chosen]
            decodes = sum(segment.start > 0 and len(segment.token_ids) == 1 for segment in segments)
            prefill = sum(item.tokens for item in chosen) - decodes
            await asyncio.sleep(self.cost.step_s(prefill, decodes))
            for item, segment in zip(chosen, segments, strict=True):
                sequence, name = item.sequence, item.sequence.request.request_id
                if item.sequence.prefilling and sequence.request.order == FLEX:
                    self.computed += item.tokens
                self.scheduler.computed(item)
                if segment.sampling is None:
                    continue
                if name not in self.first_s:
                    self.first_s[name] = self.clock.time() - sequence.arrival_s
                    if sequence.request.decision is not None:
                        self.core.release(sequence.request.decision)
                if sequence.append_token(7):
                    self.scheduler.remove(sequence)
                    self.ends.pop(name).set_result(self.first_s[name])
            self.report()

    def report(self) -> None:
        """Tell the router of blocks and load."""
        scheduler, waiting = self.scheduler, [*self.scheduler.waiting]
        prefilling = [sequence for sequence in scheduler.running if sequence.prefilling]
        others = (sequence for sequence in (*waiting, *prefilling) if not yields(sequence))
        queued = sum(sequence.uncached_tokens(16) for sequence in others)
        load = self.reports.report(
            self.clock.time(), queued_tokens=queued, running=len(scheduler.running), waiting=len(waiting)
        )
        self.core.apply(self.name, (*self.cache.take_events(), load))


class BatchCluster:
    """Replicas behind one router."""

    def __init__(self, workload: BatchWorkload, clock: VirtualLoop) -> None:
        self.workload = workload
        names = [f"replica-{number}" for number in range(workload.replicas)]
        self.core = RoutingCore("router", RouterSettings(), clock=clock.time, rng=Random(workload.seed))
        self.core.update_replicas(names)
        self.replicas = {name: BatchReplica(name, workload, self.core, clock) for name in names}
        for replica in self.replicas.values():
            replica.report()
        places = workload.replicas * workload.max_num_seqs * 3 // 2
        self.door = FrontDoor(Shares({}), places=lambda: places, max_waiting=512, max_bytes=1 << 26, clock=clock.time)
        self.asking = 0

    async def ask(self, name: str, tenant: str, ids: TokenArray, answer_tokens: int, order: int) -> float:
        """Let a request in, route it, and return its time to first token."""
        with self.door.arrive(tenant) as arrival:
            await arrival.turn(1, order, flex=order == FLEX)
            place = arrival.hand_over()
        try:
            return await self._route(name, tenant, ids, answer_tokens, order)
        finally:
            place.give_back()

    async def _route(self, name: str, tenant: str, ids: TokenArray, answer_tokens: int, order: int) -> float:
        scope = PrefixScope("batches", salt=tenant.encode())
        root = scope.root(SECRET)
        chain = next(iter(self.replicas.values())).cache.prompt_chain(scope, root, ids)
        request = EngineRequest(
            name, block_hashes=chain, tenant=tenant, token_ids=ids, scope=scope, root=root, placement_key=chain[:16],
            sampling=SamplingParams(answer_tokens), order=order,
        )  # fmt: skip
        decision = self.core.decide(request)
        assert decision is not None
        replica = self.replicas[decision.replica_id]
        return await replica.answer(structs.replace(request, decision=decision))

    async def quiet(self, _: int) -> None:
        """Wait until a batch's line may start, by the front door's rule, and none of the others waits at a replica."""
        while True:
            if self.door.is_quiet("batch", self.asking) and self.core.waiting() <= self.asking:
                self.asking += 1  # at once, as the server counts: many may start before the first of them runs
                return
            await asyncio.sleep(0.02)


def tokens(seed: str, count: int) -> TokenArray:
    """Return a prompt's tokens."""
    return np.random.default_rng(list(seed.encode())).integers(0, 32_000, count, dtype=np.int32)


async def batch(cluster: BatchCluster, *, in_order: bool) -> None:
    """Run the batch."""
    workload = cluster.workload
    lines = [(number % workload.prompts, number) for number in range(workload.lines)]
    Random(workload.seed).shuffle(lines)
    prompts = [tokens(f"prompt {number}", workload.prompt_tokens) for number in range(workload.prompts)]
    texts = [" ".join(map(str, prompt.tolist())) for prompt in prompts]
    chains = [beginnings({"messages": [texts[prompt], f"question {number}"]}) for prompt, number in lines]

    async def work(at: int) -> None:
        prompt, number = lines[at]
        ids = np.concatenate([prompts[prompt], tokens(f"question {number}", workload.question_tokens)])
        await cluster.ask(f"line {number}", "batch", ids, workload.answer_tokens, FLEX)
        cluster.asking -= 1

    at_once = cluster.door.places() // 2
    runner = LineRunner(work, lambda: at_once, lambda: LANES * workload.replicas, cluster.quiet)
    await runner.run(grouped(chains) if in_order else as_given(len(lines)))


async def chats(
    cluster: BatchCluster, seconds: float | None, over: asyncio.Event, name: str = "chat"
) -> tuple[list[float], list[float]]:
    """Send chats at random times for ``seconds``, or until it is ``over``; return times to first token and whole."""
    workload, rng = cluster.workload, Random(f"{name} {cluster.workload.seed}")
    loop, first, whole = asyncio.get_running_loop(), list[float](), list[float]()
    end_s = loop.time() + seconds if seconds is not None else float("inf")

    async def one(number: int) -> None:
        system = tokens(f"chat {rng.randrange(workload.chat_prompts)}", workload.chat_tokens)
        ids = np.concatenate([system, tokens(f"{name} question {number}", workload.question_tokens)])
        begun_s = loop.time()
        first.append(await cluster.ask(f"{name} {number}", "chat", ids, workload.chat_answer_tokens, 0))
        whole.append(loop.time() - begun_s)

    tasks: list[asyncio.Task[None]] = []
    while loop.time() < end_s and not over.is_set():
        tasks.append(asyncio.create_task(one(len(tasks))))
        await asyncio.sleep(rng.expovariate(workload.chats_per_s))
    await asyncio.gather(*tasks)
    return first, whole


def case(workload: BatchWorkload, *, batched: bool, in_order: bool, chatting: bool) -> dict[str, Any]:
    """Run one case in a fresh cluster."""
    loop = VirtualLoop()

    async def run() -> dict[str, Any]:
        cluster, over = BatchCluster(workload, loop), asyncio.Event()
        replicas = [asyncio.create_task(replica.run()) for replica in cluster.replicas.values()]
        figures: dict[str, Any] = {}
        if chatting:
            await chats(cluster, 20.0, over, "warm-up")
        talk = asyncio.create_task(chats(cluster, None if batched else 300.0, over)) if chatting else None
        begun_s = loop.time()
        if batched:
            await batch(cluster, in_order=in_order)
            figures["batch_s"] = loop.time() - begun_s
            figures["computed_tokens"] = sum(replica.computed for replica in cluster.replicas.values())
            figures["computed_to_least"] = figures["computed_tokens"] / workload.least_tokens
            over.set()
        if talk is not None:
            first, whole = await talk
            figures |= {"chats": len(first), "ttft_s": spread(first), "answer_s": spread(whole)}
            figures |= {"ttft_p99_s": percentile(first, 99), "answer_p99_s": percentile(whole, 99)}
        for task in replicas:
            task.cancel()
        await asyncio.gather(*replicas, return_exceptions=True)
        return figures

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def measure(workload: BatchWorkload) -> dict[str, Any]:
    """Return the figures of all cases, and their ratios."""
    cases = {
        "batch": {"batched": True, "in_order": True, "chatting": False},
        "file order": {"batched": True, "in_order": False, "chatting": False},
        "chats alone": {"batched": False, "in_order": True, "chatting": True},
        "chats beside the batch": {"batched": True, "in_order": True, "chatting": True},
    }
    figures: dict[str, Any] = {
        name: case(workload, **flags) for name, flags in progress(list(cases.items()), "batches")
    }
    alone, beside = figures["chats alone"], figures["chats beside the batch"]
    figures["file_order_to_batch"] = figures["file order"]["computed_tokens"] / figures["batch"]["computed_tokens"]
    figures["ttft_p99_ratio"] = beside["ttft_p99_s"] / alone["ttft_p99_s"]
    figures["answer_p99_ratio"] = beside["answer_p99_s"] / alone["answer_p99_s"]
    return figures


@benchmark(
    __doc__,
    flag("lines", 2000),
    flag("prompts", 50),
    flag("pool-prompts", 10),
    flag("chats-per-s", 2.0),
    flag("seed", 0),
    simulated=True,
)
def run(options: Options) -> Findings:
    """Run all cases."""
    workload = BatchWorkload(**{name: value for name, value in vars(options).items() if name != "json"})
    results = measure(workload)
    return Findings(
        results,
        f"{workload.lines} shuffled lines over {workload.prompts} prompts compute "
        f"{results['batch']['computed_to_least']:.3f} of the least possible tokens, in the file's order "
        f"{results['file_order_to_batch']:.1f} times as many. Beside the batch, chats' p99 is "
        f"{results['ttft_p99_ratio']:.2f} times that alone to the first token, {results['answer_p99_ratio']:.2f} times "
        "for a whole answer.",
        asdict(workload),
    )
