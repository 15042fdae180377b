"""Does the router predict cached tokens exactly? Every answer of an engine is compared with its router's prediction.

Conversations of two tenants, some with a LoRA adapter, grow and restart in a pool that is too small for them. Requests
arrive alone and in bursts, some are aborted, and sometimes the cache is reset. Half of the conversations may begin
with a public prompt, and a part of the requests stores nothing.
"""

import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.harness import Findings, Options, benchmark, engine_flag, flag, progress
from benchmarks.common.output_collector import OutputCollector, running
from benchmarks.common.random_adapters import make_adapters
from benchmarks.common.random_drafter import with_eagle_head
from benchmarks.common.random_windows import make_windowed
from router.core import RoutingCore
from router.protocol.block_hash import HASH_BYTES, PrefixScope, TokenArray, extend_chain, hash_at, split_chain
from router.protocol.events import BlocksRemoved, CacheCleared, Event
from router.protocol.request import RoutedRequest
from router.settings import RouterSettings
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.sources import resolve_model
from serve_app.config.app import AppConfig
from serve_app.config.engine import ENGINES, NGRAM, VLLM_CPU_BLOCK_SIZE
from serve_app.engine.protocol import Engine, EngineRequest, SamplingParams, TokenRules
from serve_app.replica.engine_factory import make_engine

BLOCK = VLLM_CPU_BLOCK_SIZE
REPLICA = "replica"
TENANTS = (b"a", b"b")
SYSTEM_TOKENS, LONGEST_TOKENS = 200, 900
_SECRET = b"predictions benchmark"


@benchmark(
    __doc__,
    engine_flag("torch", "prefixes", "adapters"),
    flag("requests", 2000),
    flag("blocks", 256, f"blocks of {BLOCK} tokens in the pool"),
    flag("conversations", 24, f"each of up to {LONGEST_TOKENS} tokens"),
    flag("burst", 4, "requests in a burst, in about every fifth turn"),
    flag("pause-s", 0.03, "time between turns, for cache events to arrive"),
    flag("public-tokens", 0, "tokens of a public prompt before half of them"),
    flag("unstored", 0.0, "fraction of requests with store_kv false"),
    flag("seed", 1),
    flag("drafts", 0, "tokens that vLLM drafts by n-grams; answers then repeat"),
    flag("speculative-config", None, "vLLM's, for drafts; without a model, EAGLE gets a random head", type=json.loads),
    flag("window", 0, "take a tiny model with windows of so many tokens"),
    model="demo",
)
def run(options: Options) -> Findings:
    """Compare each answer with its prediction."""
    with tempfile.TemporaryDirectory(prefix="warmpath-windows-") as directory:
        model = resolve_model(options.model)
        if options.window:
            vocab_size = load_checkpoint_info(model).vocab_size
            model = make_windowed(Path(directory) / "model", vocab_size, options.window, model)
        results = measure(model, options)
    alone, in_bursts = results["one_at_a_time"]["exact"], results["in_bursts"]["exact"]
    return Findings(
        results,
        f"Cached tokens exactly as predicted: {results['exact']:.2%} of {results['requests']} requests "
        f"({alone:.2%} of those that arrived alone, {in_bursts:.2%} of those in bursts); "
        f"the others: {results['others'] or 'none'}. {results['evictions']} blocks were evicted.",
    )


def measure(model: Path, options: Options) -> dict[str, Any]:
    """Send all requests; return the share of answers with the predicted cached tokens, and reasons for the others."""
    drafting = options.speculative_config
    if options.drafts:
        drafting = {"method": NGRAM, "num_speculative_tokens": options.drafts}
    routed = Routed()
    with tempfile.TemporaryDirectory(prefix="warmpath-predictions-") as directory, ExitStack() as stack:
        info = load_checkpoint_info(model)
        drafting = with_eagle_head(drafting, model, Path(directory) / "head")
        config = AppConfig(
            model=str(model),
            engine=options.engine,
            dtype="float32",
            block_size=BLOCK,
            num_blocks=options.blocks,
            max_model_len=2048,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            enforce_eager=True,
            allow_runtime_lora=True,
            max_lora_rank=8,
            speculative_config=drafting,
        )
        adapters = ["", ""]
        specs = [] if ENGINES[options.engine].simulated else make_adapters(model, Path(directory), 2, rank=4)
        engine = stack.enter_context(running(make_engine(config, info, routed.events)))
        for spec in specs:
            engine.adapters.load(spec)
            adapters.append(spec.key)
        blocks = sorted({0, options.public_tokens // BLOCK})
        scopes = [
            PrefixScope(info.fingerprint, adapter, tenant, public)
            for public in blocks for tenant in TENANTS for adapter in adapters
        ]  # fmt: skip
        talks = Talks(scopes, info.vocab_size, options, random.Random(options.seed))
        talks.rules = TokenRules(logit_bias=((300, 100.0),)) if drafting else None
        return _ask_all(engine, routed, talks, options)


class Routed:
    """The router, and the removals of blocks by event. Events arrive in the engine's threads."""

    def __init__(self) -> None:
        self.core = RoutingCore("predictions", RouterSettings(block_size=BLOCK))
        self.core.update_replicas([REPLICA])
        self.evictions = 0
        self._lock = threading.Lock()
        self._number = 0
        self._cleared = 0
        self._removed: dict[bytes, int] = {}

    def events(self, events: Iterable[Event]) -> None:
        """Record an engine's events."""
        events = list(events)
        with self._lock:
            self._number += 1
            for event in events:
                if isinstance(event, BlocksRemoved):
                    gone = list(split_chain(event.hashes))
                    self.evictions += len(gone)
                    self._removed |= dict.fromkeys(gone, self._number)
                elif isinstance(event, CacheCleared):
                    self._cleared = self._number
        self.core.apply(REPLICA, events)

    def number(self) -> int:
        """Return the number of event batches so far."""
        with self._lock:
            return self._number

    def gone_since(self, number: int, block_hash: bytes) -> bool:
        """Return whether a block, or the whole cache, was removed after the batch of that number."""
        with self._lock:
            return max(self._removed.get(block_hash, 0), self._cleared) > number


@dataclass(slots=True)
class Talk:
    """A conversation. ``ids``: the tokens of its next request."""

    scope: PrefixScope
    ids: TokenArray


@dataclass(frozen=True, slots=True)
class PredictedRequest:
    """A running request. ``number``: the number of the last event batch before its prediction."""

    talk: Talk
    request: EngineRequest
    chain: bytes
    predicted: int
    number: int


class Talks:
    """Conversations with one of their scope's two system prompts; long ones restart."""

    def __init__(self, scopes: Sequence[PrefixScope], vocab_size: int, options: Options, rng: random.Random) -> None:
        self._vocab = vocab_size
        self._random = rng
        self._unstored = options.unstored
        self._public = self._tokens(options.public_tokens)
        self._systems = {scope: [self._tokens(SYSTEM_TOKENS) for _ in range(2)] for scope in scopes}
        self._talks = [Talk(scope, self._opening(scope)) for scope in islice(cycle(scopes), options.conversations)]
        self._requests = 0
        self.rules: TokenRules | None = None

    def draw(self, count: int) -> list[tuple[Talk, EngineRequest]]:
        """Return the next requests of ``count`` conversations."""
        return [(talk, self._request(talk)) for talk in self._random.sample(self._talks, count)]

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self._random.random() < probability

    def answered(self, talk: Talk, tokens: Sequence[int]) -> None:
        """Continue a conversation with an answer's tokens and a new question."""
        talk.ids = np.concatenate([talk.ids, np.array(tokens, dtype=np.int32), self._tokens(50)])
        if len(talk.ids) > LONGEST_TOKENS:
            talk.ids = self._opening(talk.scope)

    def _request(self, talk: Talk) -> EngineRequest:
        self._requests += 1
        sampling = SamplingParams(self._random.choice([1, 4, 8, 16]), temperature=0.0, rules=self.rules)
        scope = talk.scope
        root = (scope.public.root(_SECRET) if scope.public_blocks else b"") + scope.private.root(_SECRET)
        stored = self._unstored == 0.0 or not self.chance(self._unstored)
        name = f"r{self._requests}"
        tenant = scope.salt.decode()
        return EngineRequest(
            name, tenant=tenant, store_kv=stored, token_ids=talk.ids, scope=scope, root=root, sampling=sampling
        )

    def _opening(self, scope: PrefixScope) -> TokenArray:
        public = self._public if scope.public_blocks else self._public[:0]
        return np.concatenate([public, self._random.choice(self._systems[scope]), self._tokens(40)])

    def _tokens(self, count: int) -> TokenArray:
        generator = np.random.default_rng(self._random.randrange(1 << 60))
        return generator.integers(300, self._vocab, count, dtype=np.int32)


def _ask_all(engine: Engine, routed: Routed, talks: Talks, options: Options) -> dict[str, Any]:
    alone, in_bursts, done = Counter[str](), Counter[str](), Counter[str]()
    bar = iter(progress(range(options.requests), "requests"))
    while alone.total() + in_bursts.total() < options.requests:
        time.sleep(options.pause_s)
        if talks.chance(0.005):
            done["resets"] += engine.reset_prefix_cache()
        burst = talks.chance(0.2)
        outputs = OutputCollector()
        requests = [_ask(engine, routed, one, outputs) for one in talks.draw(options.burst if burst else 1)]
        if burst:
            _abort_one(engine, talks, requests[-1], done)
        outputs.wait({each.request.request_id for each in requests})
        for each in requests:
            name = each.request.request_id
            talks.answered(each.talk, outputs.tokens.get(name, ()))
            if name not in outputs.cached_tokens:
                done["aborted before the first token"] += 1
                continue
            delivered = outputs.cached_tokens[name]
            done["with a hit"] += delivered > 0
            (in_bursts if burst else alone)[_compared(routed, each, delivered)] += 1
            next(bar, None)
    both = alone + in_bursts
    counts = {name: value for name, _, value in engine.stats().samples}
    return {
        **_shares(both),
        "others": {reason: count for reason, count in both.items() if reason != "exact"},
        "one_at_a_time": _shares(alone),
        "in_bursts": _shares(in_bursts),
        "evictions": routed.evictions,
        "accepted_drafts": counts.get("warmpath_spec_decode_num_accepted_tokens_total", 0.0),
        **{name.replace(" ", "_"): count for name, count in sorted(done.items())},
    }


def _ask(engine: Engine, routed: Routed, one: tuple[Talk, EngineRequest], outputs: OutputCollector) -> PredictedRequest:
    talk, request = one
    chain = extend_chain(request.root, request.scope.public_blocks, request.token_ids, BLOCK)
    number = routed.number()
    name, tokens, key = request.request_id, len(request.token_ids), request.root[:HASH_BYTES]
    route = RoutedRequest(name, chain, tokens, key, tenant=request.tenant, store_kv=request.store_kv)
    decision = routed.core.decide(route)
    assert decision is not None
    engine.submit(request, outputs)
    return PredictedRequest(talk, request, chain, decision.selected_cached_tokens, number)


def _abort_one(engine: Engine, talks: Talks, request: PredictedRequest, done: Counter[str]) -> None:
    """Abort a request of a burst at a random time, or not at all."""
    if talks.chance(0.5):
        time.sleep(0.01 if talks.chance(0.5) else 0.08)
        engine.cancel(request.request.request_id)
        done["aborts"] += 1


def _compared(routed: Routed, request: PredictedRequest, delivered: int) -> str:
    """Return "exact", or the reason for a difference from the prediction."""
    if delivered == request.predicted:
        return "exact"
    if delivered > request.predicted:
        return "in flight: another request computed it meanwhile"
    last = hash_at(request.chain, request.predicted // BLOCK - 1)
    return "evicted meanwhile" if routed.gone_since(request.number, last) else "unexplained"


def _shares(counts: Counter[str]) -> dict[str, Any]:
    total = counts.total()
    return {"requests": total, "exact": counts["exact"] / total if total else 1.0}
