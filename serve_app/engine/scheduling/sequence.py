"""A request inside the engine: its mutable state and block hashes. Positions count from the start of the prompt."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain
from secrets import token_bytes

import numpy as np
from msgspec import structs

from router.protocol.block_hash import HASH_BYTES, TokenArray
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.config.engine import Capability
from serve_app.engine.protocol import (
    EngineRequest,
    FinishReason,
    OutputSink,
    Prefilled,
    RequestTooLong,
    SamplingParams,
)
from serve_app.engine.step import BlockRun, History, Kept, Segment, block_runs, ceil_div


@dataclass(slots=True, eq=False, repr=False)
class SequenceState:
    """A submitted request.

    =================== ========= ================ ==========================================================
    name                unit      written by       meaning
    =================== ========= ================ ==========================================================
    prompt_tokens       tokens    -                length of the prompt
    length              tokens    append_token     prompt and generated tokens
    prefill_tokens      tokens    preempt          to compute before the next token can be sampled: the prompt,
                                                   and after a preemption also the tokens generated before it
    computed            tokens    Scheduler        leading positions that have KV
    farthest            tokens    preempt          most positions that had KV at once before a preemption
    cached_tokens       tokens    RunningSet       prompt tokens found in the cache at the first start
    reported_logprobs         tokens    OutputProcessor  prompt tokens after the first with reported log-probabilities
    blocks              blocks    RunningSet       block ids, one per block_size positions; empty while waiting
    published           blocks    publish          leading blocks that are indexed, so that others can hit them
    resolved            blocks    PendingBlocks    leading prompt blocks with no waiting sequences left
    reserved_blocks     blocks    RunningSet       reserved at the start and not allocated yet
    cached_blocks_hint    blocks    Scheduler        while waiting: estimated leading blocks, cached or in transit
    number, turn_s      -, s      Scheduler        place in the order of turns: of its arrival, or of a later one
    beyond_reservation  -         RunningSet       whether it holds more blocks than were reserved for it
    =================== ========= ================ ==========================================================

    While it runs: published, resolved <= computed / block_size <= blocks, computed <= length, and
    prompt <= prefill_tokens <= length. While it waits it has neither KV nor blocks nor a reservation.
    """

    request: EngineRequest
    sink: OutputSink
    chain: bytes
    arrival_s: float
    number: int = 0
    preemptions: int = 0
    farthest: int = 0
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    published: int = 0
    resolved: int = 0
    cached_tokens: int = 0
    reported_logprobs: int = 0
    reserved_blocks: int = 0
    beyond_reservation: bool = False
    cached_blocks_hint: int = 0
    decode_turn: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    turn_s: float = field(init=False)
    prompt_tokens: int = field(init=False)
    length: int = field(init=False)
    prefill_tokens: int = field(init=False)
    _tokens: TokenArray = field(init=False)
    _identity: TokenArray = field(init=False)
    _kept: Kept = field(default_factory=Kept)
    _runs: list[BlockRun] = field(default_factory=list)
    _runs_cover: int = 0

    def __post_init__(self) -> None:
        prompt = self.request.token_ids
        self._tokens = np.empty(len(prompt) + self.request.sampling.max_tokens, dtype=np.int32)
        self._tokens[: len(prompt)] = prompt
        self._identity = self._tokens
        if self.request.hashed_ids is not None:
            self._identity = self._tokens.copy()
            self._identity[: len(prompt)] = self.request.hashed_ids
        self.length = self.prefill_tokens = self.prompt_tokens = len(prompt)
        self.turn_s = self.arrival_s

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled so far."""
        return self.length - self.prompt_tokens

    @property
    def identity(self) -> TokenArray:
        """What caches compare for prompt and generated tokens (a view)."""
        return self._identity[: self.length]

    @property
    def hashed_tokens(self) -> HashedTokens:
        """The tokens so far, as caches compare them, with their hashes, scope and tenant."""
        return HashedTokens(self.request.scope, self.identity, self.chain, self.request.tenant)

    @property
    def prefilling(self) -> bool:
        """Whether tokens remain to be computed before the next one can be sampled.

        Loops over all sequences of a step compare by themselves: a call a token is what they cost.
        """
        return self.computed < self.prefill_tokens

    @property
    def reads_kv(self) -> bool:
        """Whether it may start with cached blocks."""
        return self.request.reads_kv or self.reported_logprobs == self.prompt_tokens - 1

    def reusable_blocks(self, cache: PrefixCache) -> int:
        """Return how many leading blocks of its prefill it could take from a cache that holds them all."""
        return cache.reusable_blocks(self.prefill_tokens) if self.reads_kv else 0

    @property
    def prefilled(self) -> Prefilled:
        """What was done for the prompt so far."""
        return Prefilled(min(max(self.computed, self.farthest), self.prompt_tokens), self.cached_tokens)

    @property
    def most_tokens(self) -> int:
        """Upper bound of the positions with KV: the last sampled token never has any."""
        return self.prompt_tokens + max(self.request.sampling.max_tokens - 1, 0)

    @property
    def awaits_remote_kv(self) -> bool:
        """Whether KV for this request is in transit from another replica."""
        remote_kv = self.request.remote_kv
        return remote_kv is not None and not remote_kv.done

    def uncached_tokens(self, block_size: int) -> int:
        """Return the prefill tokens still to compute; while waiting, by the hint of blocks cached or in transit."""
        done = self.computed if self.blocks else self.cached_blocks_hint * block_size
        if self.awaits_remote_kv and self.request.remote_kv is not None:
            done = max(done, self.request.remote_kv.tokens)
        return max(self.prefill_tokens - done, 0)

    def swap_turn(self, other: "SequenceState") -> None:
        """Exchange turns with ``other``; both wait."""
        self.number, other.number = other.number, self.number
        self.turn_s, other.turn_s = other.turn_s, self.turn_s

    def segment(self, tokens: int) -> Segment:
        """Return the next ``tokens`` positions as a step's segment; the prompt's last one samples a token."""
        end = self.computed + tokens
        samples = end == self.length and self.request.sampling.max_tokens > 0
        ruled = self.request.sampling.rules is not None or self.request.matcher is not None
        first_target, targets = max(self.computed, self.reported_logprobs) + 1, None
        if self.request.sampling.prompt_logprobs is not None and first_target < self.prompt_tokens:
            targets = self._tokens[first_target : min(end + 1, self.prompt_tokens)]
        return Segment(
            token_ids=self._tokens[self.computed : end],
            start=self.computed,
            blocks=self.blocks,
            runs=self._runs if self._runs_cover == len(self.blocks) else self._current_runs(),
            sampling=self.request.sampling if samples else None,
            lora=self.request.scope.lora,
            history=self._history() if samples and ruled else None,
            targets=targets,
            first_target=first_target,
            tops=self.request.sampling.prompt_logprobs or 0,
        )

    def append_token(self, token: int) -> FinishReason | None:
        """Append a token unless it is a stop token; return why the answer ends, or None if it continues."""
        sampling = self.request.sampling
        if token in sampling.stop_token_ids:
            return "stop"
        self._tokens[self.length] = self._identity[self.length] = token
        self.length += 1
        return "length" if self.length - self.prompt_tokens >= sampling.max_tokens else None

    def publish(self, cache: PrefixCache) -> None:
        """Index all complete blocks computed so far, generated ones too, unless the request stores nothing."""
        full = self.computed // cache.block_size
        if not cache.enabled or not self.request.store_kv or full <= self.published:
            return
        self._extend_chain(cache, full)
        before = self.blocks[self.published : full]
        self.published = cache.publish(
            self.request.scope, self._identity, self.chain, self.blocks, self.published, full
        )
        if before != self.blocks[full - len(before) : full]:
            self._runs_cover = 0

    def preempt(self, cache: PrefixCache) -> None:
        """Give all blocks back and return to the state before the start; generated tokens join the prefill."""
        self.preemptions += 1
        self.farthest = max(self.farthest, self.computed)
        self.prefill_tokens = self.length
        if cache.enabled:
            self._extend_chain(cache, self.length // cache.block_size)
        self.cached_blocks_hint = self.published if self.reads_kv else 0
        self.release(cache)
        self.computed = self.published = self.resolved = 0
        self.beyond_reservation = False

    def split_prefill(self, tokens: int) -> tuple[int, int]:
        """Split the next ``tokens`` positions into new prompt positions and those that already had KV before."""
        start, end = self.computed, self.computed + tokens
        again = max(min(end, self.farthest) - start, 0)
        return max(min(end, self.prompt_tokens) - start - again, 0), again

    def release(self, cache: PrefixCache) -> None:
        """Give all blocks back."""
        cache.release(self.blocks)
        self.blocks = []
        self._runs_cover = 0

    def _extend_chain(self, cache: PrefixCache, blocks: int) -> None:
        if len(self.chain) // HASH_BYTES < blocks:
            identity = self._identity[: blocks * cache.block_size]
            self.chain = cache.prompt_chain(self.request.scope, self.request.root, identity, self.chain)

    def _history(self) -> History:
        """Return the client's prompt and the answer, which includes tokens that another replica generated."""
        client_tokens = self.prompt_tokens - self.request.resumed_tokens
        return History(
            self._tokens[:client_tokens],
            self._tokens[client_tokens : self.length],
            self.request.matcher,
            kept=self._kept,
        )

    def _current_runs(self) -> list[BlockRun]:
        if self._runs_cover == 0:
            self._runs = []
        for first, count in block_runs(self.blocks[self._runs_cover :]):
            if self._runs and sum(self._runs[-1]) == first:
                self._runs[-1] = (self._runs[-1][0], self._runs[-1][1] + count)
            else:
                self._runs.append((first, count))
        self._runs_cover = len(self.blocks)
        return self._runs


def check_rules(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError for rules that no sampler can follow."""
    rules = sampling.rules
    assert rules is not None
    named = [*sampling.stop_token_ids, *(token for token, _ in rules.logit_bias), *chain(*rules.bad_words)]
    named += rules.allowed
    if any(not 0 <= token < vocab_size for token in named):
        raise ValueError(f"token ids of rules must be 0 to {vocab_size - 1}")
    if not all(rules.bad_words):
        raise ValueError("bad_words must each have a token")
    penalties = (rules.presence_penalty, rules.frequency_penalty, *(bias for _, bias in rules.logit_bias))
    if not (all(map(math.isfinite, penalties)) and 0.0 < rules.repetition_penalty < math.inf):
        raise ValueError("penalties and biases must be finite, and repetition_penalty over 0")


def check_request(
    request: EngineRequest, *, vocab_size: int, max_model_len: int, max_blocks: int, block_size: int
) -> None:
    """Raise ValueError for malformed input and RequestTooLong for a request that can never fit, before queueing."""
    ids, sampling = request.token_ids, request.sampling
    if ids.ndim != 1 or len(ids) == 0 or ids.dtype.kind not in "iu":
        raise ValueError("token_ids must be a one-dimensional integer array with at least one id")
    if len(request.identity) != len(ids):
        raise ValueError("hashed_ids must have an id for each of token_ids")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(f"token ids must be 0 to {vocab_size - 1}")
    if request.saves and not request.store_kv:
        raise ValueError("a request that stores no KV cannot save any")
    if sampling.max_tokens < 0:
        raise ValueError("max_tokens must not be negative")
    if not sampling.temperature >= 0.0 or sampling.temperature == float("inf"):
        raise ValueError("temperature must be a finite number of at least 0")
    if not 0.0 < sampling.top_p <= 1.0 or sampling.top_k < 0 or not 0.0 <= sampling.min_p <= 1.0:
        raise ValueError("top_p must be over 0 and at most 1, top_k at least 0, and min_p from 0 to 1")
    if sampling.prompt_logprobs is not None and sampling.prompt_logprobs < 0:
        raise ValueError("prompt_logprobs must not be negative")
    if not all(0 <= token < vocab_size for token in sampling.logprob_token_ids):
        raise ValueError(f"logprob_token_ids must be 0 to {vocab_size - 1}")
    if not 0 <= request.resumed_tokens < len(ids):
        raise ValueError("resumed_tokens must leave a token of the prompt")
    if sampling.rules is not None:
        check_rules(sampling, vocab_size)
    if len(request.root) != (2 * HASH_BYTES if request.scope.public_blocks else HASH_BYTES):
        raise ValueError(f"root must have {HASH_BYTES} bytes, plus as many of the public scope if blocks are public")
    if not 0 <= request.scope.public_blocks <= len(ids) // block_size:
        raise ValueError("public_blocks must not exceed the full blocks of the prompt")
    if request.block_hashes and len(request.block_hashes) != len(ids) // block_size * HASH_BYTES:
        raise ValueError("block_hashes must hold one hash for each full block of the prompt")
    needed = len(ids) + sampling.max_tokens
    if needed > max_model_len:
        raise RequestTooLong(
            f"{len(ids)} prompt tokens and max_tokens {sampling.max_tokens} exceed the limit of {max_model_len} tokens"
        )
    if ceil_div(needed, block_size) > max_blocks:
        raise RequestTooLong(f"{needed} tokens exceed the KV pool of {max_blocks * block_size} tokens")


def possible(request: EngineRequest, off: Collection[Capability]) -> EngineRequest:
    """Return a request without the capabilities that are off: what others must not read has a root of its own."""
    if "public_prompts" in off and request.scope.public_blocks:
        root, scope = request.root[HASH_BYTES:], request.scope.private
        request = structs.replace(request, root=root, scope=scope, block_hashes=b"")
    if "store_kv" in off and not request.store_kv:
        root, scope = token_bytes(HASH_BYTES), request.scope.private
        request = structs.replace(request, root=root, scope=scope, block_hashes=b"", saves=())
    return request
