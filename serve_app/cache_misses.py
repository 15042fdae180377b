"""The reasons of cache misses: a prompt is compared with its tenant's earlier ones, in threads beside the answers.

``MissDetector`` remembers an ingress's prompts, ``explain`` compares, ``difference`` classifies the first difference.
"""

import asyncio
import logging
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from router.protocol.block_hash import PrefixScope, TokenArray, common_tokens
from serve_app.engine.protocol import EngineRequest
from serve_app.fairness.queue import FairWorkers
from serve_app.generation.request_usage import RequestUsage
from serve_app.prompts.lock import first_difference

DifferenceKind = Literal["time", "id"]
"""The kind of a value that changes between requests: a date, time or timestamp; a UUID, or a separate number."""
Difference = DifferenceKind | Literal["whitespace", "reordered", "text"]

VALUE_CHARS = 80
"""The maximum length of a value."""
MAX_CHARS = 16 << 10
"""The maximum text read after a difference to classify it."""
SPACE_CHARS = 24

_WEEKDAY = r"(?:(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*\.?,?\s+)?"
_MONTH = r"(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]*\.?"
_DAY, _YEAR = r"(?:0?[1-9]|[12]\d|3[01])", r"(?:19|20)\d\d"
_TIMES = (
    rf"{_YEAR}([-/.]?)(?:0[1-9]|1[0-2])\1{_DAY}(?!\d)",
    rf"{_DAY}([./-]){_DAY}\1(?:{_YEAR}|\d\d)(?![./-]?\d)",
    rf"{_WEEKDAY}{_DAY}(?:st|nd|rd|th)?[\s-](?:of\s)?{_MONTH}(?:,?[\s-]{_YEAR})?(?!\w)",
    rf"{_WEEKDAY}{_MONTH}\s{_DAY}(?:st|nd|rd|th)?(?:,?\s{_YEAR})?(?!\w)",
    rf"{_YEAR}\s?[年년]\s?\d{{1,2}}\s?[月월]\s?\d{{1,2}}\s?[日일]",
    r"(?:\d\d|\d(?=:\d\d(?::\d|\s?[ap]\.?m)))(?::[0-5]\d){1,2}(?:[.,]\d+)?(?:\s?[ap]\.?m\b)?(?![\d:])",
    r"(?:[01]?\d|2[0-3])\s?[h時时시]\s?[0-5]\d(?!\d)",
    r"1[4-9]\d{8}(?:\.\d{1,9}|\d{3}|\d{6}|\d{9})?(?![\w-])(?!\.\d)",
)
# A separate number: not part of a version, price, percentage or phone number.
_NUMBER = r"(?<![\w.,:$€£¥+/-])\d{1,9}(?!\w)(?![.,:/-]\d)(?!\s?[%€$£°])"
_PATTERNS: tuple[tuple[DifferenceKind, re.Pattern[str]], ...] = (
    ("id", re.compile(r"(?<![0-9a-f])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f])", re.I)),
    ("id", re.compile(r"(?<![0-9A-Za-z])0[0-7][0-9A-HJKMNP-TV-Z]{24}(?![0-9A-Za-z])")),  # a ULID
    *(("time", re.compile(rf"(?<![a-su-z0-9.:]){pattern}", re.I)) for pattern in _TIMES),
    ("id", re.compile(_NUMBER)),
)
_SPACE = re.compile(r"[\s\u200b\u200c\u200d\u2060\ufeff]+")
_WORDS = re.compile(r"\w+|[^\w\s,]")
_WORD_THERE = re.compile(r"\s*\S+|\s+")


def _values_at(text: str, place: int) -> Iterator[tuple[DifferenceKind, int, str]]:
    """Yield kind, start and text of the values that contain the character at ``place``, or end there."""
    begin = max(0, place - VALUE_CHARS)
    for kind, pattern in _PATTERNS:
        for match in pattern.finditer(text, begin, place + VALUE_CHARS):
            if match.start() <= place <= match.end():
                yield kind, match.start(), match.group()


def classify(new: str, old: str, place: int) -> Difference:
    """Return the class of the difference at ``place`` between two texts that are equal before it."""
    if _differs_in_space(new, old, place):
        return "whitespace"
    before = {(kind, start): value for kind, start, value in _values_at(old, place)}
    for kind, start, value in _values_at(new, place):
        if before.get((kind, start), value) != value:
            return kind
    return "reordered" if _is_reordered(new, old, place) else "text"


def value_there(text: str, place: int) -> str:
    """Return the value at a place of a text, or the rest of the word there, at most 64 characters."""
    for _, _, value in _values_at(text, place):
        return value[:64]
    word = _WORD_THERE.match(text, place)
    return word.group()[:64] if word else ""


def _differs_in_space(new: str, old: str, place: int) -> bool:
    rests = [text[place : place + 16 * SPACE_CHARS] for text in (new, old)]
    # At a place between two words, either text may have the space.
    if not any(_SPACE.match(rest) for rest in rests):
        return False
    new_words, old_words = (_SPACE.sub("", rest)[:SPACE_CHARS] for rest in rests)
    return new_words == old_words != ""


def _is_reordered(new: str, old: str, place: int) -> bool:
    """Return whether the lines from the place on are equal in another order, or the fields of one JSON line."""
    start = new.rfind("\n", 0, place) + 1
    lines = (text[start : start + MAX_CHARS].split("\n") for text in (new, old))
    unmatched: Counter[str] = Counter()
    for count, (new_line, old_line) in enumerate(zip(*lines, strict=False), 1):
        for line, sign in ((new_line, 1), (old_line, -1)):
            words = " ".join(sorted(_WORDS.findall(line)))
            unmatched[words] += sign
            if not unmatched[words]:
                del unmatched[words]
        if not unmatched:
            return count > 1 or '":' in new_line
    return False


MissReason = Difference | Literal["adapter", "salt", "evicted", "reasoning", "never_seen", "not_compared"]

MAX_PROMPT_TOKENS = 32_768
"""The maximum of one prompt's tokens that is remembered and compared."""
MIN_MISSED_TOKENS = 64
"""Fewer computed tokens are not a miss, because a new question needs as many."""
MISSED_PART = 8
"""A miss computes at least one in this many of its prompt's tokens. A new turn of a long conversation is not a miss."""
MIN_LOST_TOKENS = 32
"""Fewer recomputed tokens are not reported."""
MAX_COMPARED = 4
"""The number of earlier prompts compared in full: those with the longest common prefix."""
OPENING_TOKENS = 8
"""A template that opens reasoning ends a prompt with up to this many tokens, which the next prompt lacks."""
GRAM = 8
"""This many equal tokens identify the same place in two prompts."""
LONG_TOKENS, SAMPLED_PART = 2048, 8
"""Prompts of this length are compared only with prompts that share a gram from a sample of an eighth."""
BEFORE_TOKENS, BEHIND_TOKENS = 64, 1024
"""The tokens of both texts read around their first difference."""

_MULTIPLIERS = np.random.default_rng(1).integers(1 << 63, size=3, dtype=np.uint64) | np.uint64(1)
"""For grams of 2, 4 and 8 tokens."""

_LARGEST = np.iinfo(np.uint64).max

Decode = Callable[[Sequence[int]], str]
"""Token ids -> their text, special tokens included."""

REMEDIES: dict[MissReason, str] = {
    "time": "Move the date or time after the parts that stay the same, best into the last user message, or remove it "
    "from the prompt.",
    "id": "Remove changing ids and numbers from the prompt, or move them into the last user message.",
    "whitespace": "Write the prompt from one template: spaces and line ends must be the same each time.",
    "reordered": "Write JSON with sorted keys, and tools and lists in a fixed order.",
    "text": "The prompt changed here. If this part changes with each request, move it after the parts that do not.",
    "adapter": "Each LoRA adapter has its own KV: send requests with one prompt to one adapter.",
    "salt": "The same prompt arrived with another cache_salt, which separates KV: use one salt where that is allowed.",
    "evicted": "The prompt was computed before, but its KV is gone or on a busier replica: see `warmpath plan`, pin it "
    "(cache_control, save_system_prompt_kv_cache), or add memory.",
    "reasoning": "No change is needed: the chat template omits the reasoning of earlier answers, so the text after it "
    "is computed once more.",
    "never_seen": "None of the last prompts begins like this one: the first request with a prompt computes it.",
    "not_compared": "The prompts are equal in the compared part.",
}


class SeenPrompt:
    """The beginning of one prompt. ``seen_s``: the time of its first token, by ``time.perf_counter``.

    ``usage``: of its answer, which continues.
    """

    def __init__(
        self,
        token_ids: TokenArray,
        scope: PrefixScope,
        system_chars: int,
        seen_s: float,
        usage: RequestUsage | None = None,
    ) -> None:
        # A view of a long prompt would keep all of it in memory.
        self.ids = token_ids if len(token_ids) <= MAX_PROMPT_TOKENS else token_ids[:MAX_PROMPT_TOKENS].copy()
        self.cache = scope.lora, scope.salt
        self.system_chars = system_chars
        self.seen_s = seen_s
        self._usage = usage

    def answer_after_reasoning(self) -> int:
        """Return the number of its answer's tokens after the reasoning, or 0 without reasoning."""
        used = self._usage.total() if self._usage is not None else None
        return used.completion_tokens - used.reasoning_tokens if used is not None and used.reasoning_tokens else 0


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """A prompt's first difference. ``line``: from 1. ``found``: the text there, at most 64 characters."""

    part: Literal["system", "messages"]
    token: int
    char: int
    line: int
    found: str


@dataclass(frozen=True, slots=True)
class Miss:
    """The reason for a miss. ``lost_tokens``: recomputed, although an earlier prompt had them in this order."""

    reason: MissReason
    lost_tokens: int
    first_difference: FirstDifference | None = None

    def shown(self) -> dict[str, Any]:
        """Return the miss as fields of an answer, without another prompt's text."""
        return {**asdict(self), "remedy": REMEDIES[self.reason]}


def is_miss(prompt_tokens: int, cached_tokens: int) -> bool:
    """Return whether enough tokens were computed for a miss."""
    missed = prompt_tokens - cached_tokens
    return missed >= MIN_MISSED_TOKENS and missed * MISSED_PART >= prompt_tokens


def explain(prompt: SeenPrompt, cached_tokens: int, earlier: Sequence[SeenPrompt], decode: Decode) -> Miss:
    """Return the reason for a prompt's miss beyond ``cached_tokens``.

    ``earlier``: its tenant's prompts that were answered before it arrived. O(remembered tokens), in numpy.
    """
    common = {seen: common_tokens(prompt.ids, seen.ids) for seen in earlier}
    siblings = [seen for seen in earlier if seen.cache == prompt.cache]
    own = max((common[seen] for seen in siblings), default=0)
    if own == MAX_PROMPT_TOKENS:
        return Miss("not_compared", 0)
    if own - cached_tokens >= MIN_MISSED_TOKENS:
        return Miss("evicted", own - cached_tokens)
    longest = max(earlier, key=lambda seen: common[seen], default=None)
    if longest is not None and common[longest] - max(own, cached_tokens) >= MIN_MISSED_TOKENS:
        return Miss("adapter" if longest.cache[0] != prompt.cache[0] else "salt", common[longest] - cached_tokens)
    # An earlier prompt with a common prefix far shorter than the cached one explains nothing.
    least = cached_tokens - len(prompt.ids) // MISSED_PART
    near = sorted((seen for seen in siblings if common[seen] >= least), key=lambda seen: (common[seen], seen.seen_s))
    if near and common[near[-1]] >= len(near[-1].ids) - OPENING_TOKENS and near[-1].answer_after_reasoning():
        return Miss("reasoning", min(len(prompt.ids) - cached_tokens, near[-1].answer_after_reasoning()))
    part = SAMPLED_PART if len(prompt.ids) >= LONG_TOKENS else 1
    sample = _sample(prompt.ids, part)
    for seen in near[: -MAX_COMPARED - 1 : -1]:
        if sample.isdisjoint(_sample(seen.ids[common[seen] :], part)):
            continue
        lost_tokens = equal_behind(prompt.ids, seen.ids, common[seen])
        if lost_tokens >= MIN_LOST_TOKENS:
            reason, place = _difference(prompt, seen, common[seen], decode)
            return Miss(reason, lost_tokens, place)
    return Miss("never_seen", 0)


def equal_behind(new: TokenArray, old: TokenArray, start: int) -> int:
    """Return the number of tokens of ``new`` from ``start`` on that are in a gram of ``old`` from ``start`` on."""
    equal = np.isin(_grams(new[start:]), _grams(old[start:]))
    return int(np.count_nonzero(np.convolve(equal, np.ones(GRAM)))) if equal.any() else 0


def _sample(ids: TokenArray, part: int) -> set[int]:
    """Return one in ``part`` grams: those with small hashes, which are the same in every prompt."""
    grams = _grams(ids)
    return set(grams[grams <= _LARGEST // part].tolist())


def _grams(ids: TokenArray) -> npt.NDArray[np.uint64]:
    """Return a hash of the ``GRAM`` tokens from each token on, as long as there are enough."""
    hashes = ids.astype(np.uint64)
    for power, multiplier in enumerate(_MULTIPLIERS):
        tokens = 1 << power
        hashes = hashes[:-tokens] * multiplier + hashes[tokens:]
    return hashes


def _difference(prompt: SeenPrompt, seen: SeenPrompt, token: int, decode: Decode) -> tuple[MissReason, FirstDifference]:
    start = max(0, token - BEFORE_TOKENS)
    before = decode(prompt.ids[:start].tolist())
    new, old = (decode(known.ids[start : token + BEHIND_TOKENS].tolist()) for known in (prompt, seen))
    at = first_difference(new, old)
    char = len(before) + at
    line = before.count("\n") + new.count("\n", 0, at) + 1
    part: Literal["system", "messages"] = "system" if char < prompt.system_chars else "messages"
    # A reader looks for the beginning of the value, not for its first changed digit.
    return classify(new, old, at), FirstDifference(part, token, char, line, value_there(new, at))


logger = logging.getLogger(__name__)

MAX_AT_ONCE = 4
"""The maximum of a tenant's misses explained at once. Further ones are counted as ``not_compared``."""
MAX_FAMILIES = 32
FAMILY_PROMPTS = 4
"""The maximum of prompts with one system prompt, so that a popular one does not displace others."""
MAX_TENANT_BYTES = 4 << 20
MAX_BYTES = 64 << 20
"""The maximum for all tenants together."""
PROMPT_BYTES = 512
"""A prompt's memory beside its tokens."""


class PromptMemory:
    """The prompts of all tenants, by family. ``tenants``: their number.

    Each tenant has an equal part of ``MAX_BYTES``, so that its explanations reveal nothing about others.
    """

    def __init__(self, tenants: Callable[[], int]) -> None:
        self._tenants = tenants
        self._rooms: OrderedDict[str, OrderedDict[bytes, deque[SeenPrompt]]] = OrderedDict()

    def prompts(self, tenant: str) -> list[SeenPrompt]:
        """Return a tenant's prompts, with the least recently used family first."""
        return [prompt for family in self._rooms.get(tenant, {}).values() for prompt in family]

    def add(self, tenant: str, family: bytes, prompt: SeenPrompt) -> None:
        """Remember a prompt of a tenant, and drop its oldest families until all fit."""
        tenants = max(1, self._tenants())
        room = self._rooms.setdefault(tenant, OrderedDict())
        self._rooms.move_to_end(tenant)
        while len(self._rooms) > tenants:  # tenants no longer configured
            self._rooms.popitem(last=False)
        room.setdefault(family, deque(maxlen=FAMILY_PROMPTS)).append(prompt)
        room.move_to_end(family)
        most_bytes = min(MAX_TENANT_BYTES, MAX_BYTES // tenants)
        while (
            len(room) > MAX_FAMILIES
            or sum(seen.ids.nbytes + PROMPT_BYTES for seen in self.prompts(tenant)) > most_bytes
        ):
            room.popitem(last=False)


@dataclass(eq=False)
class MissDetector:
    """Explains the misses of one ingress. ``count`` receives the tenant, reason and lost tokens of each."""

    decode: Decode
    workers: FairWorkers
    memory: PromptMemory
    count: Callable[[str, str, int], None]
    _under_way: Counter[str] = field(default_factory=Counter)
    _tasks: set[asyncio.Task[Miss]] = field(default_factory=set)

    def observe(
        self,
        generation: EngineRequest,
        cached_tokens: int,
        arrived_s: float,
        now_s: float,
        usage: RequestUsage | None = None,
    ) -> asyncio.Task[Miss] | None:
        """Remember a prompt at its first token. Return a task for a miss's explanation, else None.

        ``usage``: of the answer, which continues. A request that leaves nothing in the cache is neither remembered nor
        explained.
        """
        if not generation.store_kv:
            return None
        tenant, task = generation.tenant, None
        prompt = SeenPrompt(generation.token_ids, generation.scope, generation.system_chars, now_s, usage)
        if generation.reads_kv and is_miss(len(generation.token_ids), cached_tokens):
            if self._under_way[tenant] < MAX_AT_ONCE:
                self._under_way[tenant] += 1
                earlier = [seen for seen in self.memory.prompts(tenant) if seen.seen_s < arrived_s]
                task = asyncio.create_task(self._explain(tenant, prompt, cached_tokens, earlier))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self.count(tenant, "not_compared", 0)
        self.memory.add(tenant, generation.placement_key, prompt)
        return task

    async def _explain(
        self, tenant: str, prompt: SeenPrompt, cached_tokens: int, earlier: Sequence[SeenPrompt]
    ) -> Miss:
        try:
            miss = await self.workers.run(
                tenant, prompt.ids.nbytes, explain, prompt, cached_tokens, earlier, self.decode
            )
        except Exception:  # an answer must not fail with its explanation
            logger.exception("a miss could not be explained")
            miss = Miss("not_compared", 0)
        finally:
            self._under_way[tenant] -= 1
        self.count(tenant, miss.reason, miss.lost_tokens)
        return miss
