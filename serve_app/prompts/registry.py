"""Registered prompts: a reference -> a tenant's text. The tokens of public ones are public in any prompt.

The promoted version of each name is stored in a file; of two states, all ingresses use the higher one.
``PromptTraffic`` counts the use of each version at one ingress, in bounded memory.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import secrets
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import date
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from router.protocol.samples import TIME_CELLS_S, Sample, quantile_s
from serve_app.config.prompts import PublicPromptConfig
from serve_app.errors import InvalidRequest, NotFound
from serve_app.prompts.lock import Prompt, PromptDirectory, PromptError, read_bounded, write_atomically

if TYPE_CHECKING:
    from serve_app.tokenization.tokenizer import PromptTokenizer

STATE = "promotions.json"
MAX_FIGURES = 1024
"""Versions whose use an ingress counts; the one used least recently goes first."""


class Cutover(msgspec.Struct, frozen=True, omit_defaults=True):
    """Versions of one name, "" for none. ``coming``: that of a part of the conversations, ``coming_percent`` of 100."""

    promoted: str
    previous: str = ""
    coming: str = ""
    coming_percent: float = 0.0


class Cutovers(msgspec.Struct, frozen=True):
    """All names' cut-overs. ``serial`` grows with each change. ``by`` distinguishes two simultaneous changes."""

    serial: int = 0
    by: str = ""
    names: Mapping[str, Cutover] = {}

    def newer_than(self, other: Cutovers) -> bool:
        """Return whether this state replaces the other. Of two different states, exactly one does."""
        return (self.serial, self.by) > (other.serial, other.by)

    def promoted(self, name: str, version: str) -> Cutovers:
        """Return the state after the promotion of a version."""
        before = self.names.get(name, Cutover(""))
        previous = before.promoted if before.promoted != version else before.previous
        return self._with(name, Cutover(version, previous))

    def cut_over(self, name: str, version: str, percent: float) -> Cutovers:
        """Return the state after ``percent`` of the conversations, above 0, have moved to a version.

        100: it is promoted. Raises InvalidRequest.
        """
        before = self.names.get(name)
        if percent >= 100:
            return self.promoted(name, version)
        if before is None or before.promoted == version:
            said = "no version" if before is None else f"{name}@{version} itself"
            raise InvalidRequest(
                f"A part of the conversations moves from the promoted version of {name[:64]!r} to another, and {said} "
                "is promoted; promote the one to begin with.",
                param="prompt_ref",
            )
        return self._with(name, Cutover(before.promoted, before.previous, version, percent))

    def rolled_back(self, name: str) -> Cutovers:
        """Return the state without a cut-over in part, or after a return to the previous version.

        Raises InvalidRequest.
        """
        before = self.names.get(name)
        if before is not None and before.coming:
            return self._with(name, Cutover(before.promoted, before.previous))
        if before is None or not before.previous:
            raise InvalidRequest(f"There is no earlier version of {name[:64]!r} to return to.", param="prompt_ref")
        return self._with(name, Cutover(before.previous))

    def refs(self, name: str) -> list[str]:
        """Return the references of a name's versions in use, the promoted one first."""
        cutover = self.names.get(name, Cutover(""))
        versions = dict.fromkeys((cutover.promoted, cutover.coming, cutover.previous))
        return [f"{name}@{version}" for version in versions if version]

    def version(self, name: str, tenant: str, key: str) -> str:
        """Return the version for a tenant's conversation, "" for none. ``key``: what stays the same in it."""
        cutover = self.names.get(name)
        if cutover is None:
            return ""
        coming = cutover.coming and _place(tenant, key, f"{name}@{cutover.coming}") < cutover.coming_percent
        return cutover.coming if coming else cutover.promoted

    def check(self, refs: Collection[str]) -> None:
        """Raise PromptError if a version in use is not among ``refs``."""
        missing = [ref for name in self.names for ref in self.refs(name) if ref not in refs]
        if missing:
            raise PromptError(f"{missing[0]} is in use ({STATE}) and not locked; put it back, or roll back first")

    def _with(self, name: str, cutover: Cutover) -> Cutovers:
        return Cutovers(self.serial + 1, secrets.token_hex(4), {**self.names, name: cutover})


def _place(tenant: str, key: str, ref: str) -> float:
    """Return a conversation's place among all, from 0 to below 100: the same at each ingress, at each time.

    It differs between versions (``ref``), so that nobody is the first to get each of them.
    """
    fields = b"".join(
        len(one).to_bytes(8) + one for one in (w.encode(errors="surrogatepass") for w in (tenant, key, ref))
    )
    return 100 * int.from_bytes(blake2b(fields, digest_size=6).digest()) / 2**48


def read_cutovers(directory: Path) -> Cutovers:
    """Return the last written state, or an empty one without a file. Raises PromptError."""
    file = directory / STATE
    try:
        return msgspec.json.decode(read_bounded(file, 1 << 20), type=Cutovers)
    except FileNotFoundError:
        return Cutovers()
    except (OSError, ValueError) as error:
        raise PromptError(f"cannot read {file}: {error}") from error


def write_cutovers(directory: Path, cutovers: Cutovers) -> None:
    """Write the state for later starts. Raises OSError."""
    write_atomically(directory / STATE, msgspec.json.format(msgspec.json.encode(cutovers)) + b"\n")


class Use(NamedTuple):
    """A kind of request for a prompt, with its own KV. ``tenant``: the latest. ``chat``: by the template, else text."""

    tenant: str
    model: str
    lora_name: str | None
    cache_salt: str | None
    chat: bool


class VersionCounts(NamedTuple):
    """The figures of one version. ``warm_requests``: requests that found all of it in the cache.

    ``ttft_s``: the sum of their times to first token; ``ttft_cells``: the numbers of them by ``TIME_CELLS_S``.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    warm_requests: int = 0
    ttft_s: float = 0.0
    ttft_cells: Mapping[int, int] = Counter()  # never changed in place

    def plus(self, other: VersionCounts) -> VersionCounts:
        """Return the sum of both."""
        requests, prompt_tokens, cached_tokens, warm_requests, ttft_s = map(operator.add, self[:5], other[:5])
        cells = Counter(self.ttft_cells)
        cells.update(other.ttft_cells)
        return VersionCounts(requests, prompt_tokens, cached_tokens, warm_requests, ttft_s, cells)

    def to_json(self) -> dict[str, Any]:
        """Return the figures for operators."""
        return {
            "requests": self.requests,
            "cold_requests": self.requests - self.warm_requests,
            "hit_rate": round(self.cached_tokens / self.prompt_tokens, 4) if self.prompt_tokens else None,
            "ttft_p50_s": quantile_s(self.ttft_cells, 0.5),
            "ttft_p95_s": quantile_s(self.ttft_cells, 0.95),
        }


class PromptTraffic:
    """Requests at one ingress by NAME@VERSION. ``least_tokens``: cached tokens that imply a fully cached version."""

    def __init__(self, least_tokens: Callable[[str], int] = lambda _: 1) -> None:
        self._least_tokens = least_tokens
        self._figures: OrderedDict[str, VersionCounts] = OrderedDict()
        self._uses: dict[str, OrderedDict[Use, Use]] = {}

    def add(self, ref: str, prompt_tokens: int, cached_tokens: int, ttft_s: float) -> None:
        """Count one request with a first token."""
        warm, cell = self._is_warm(ref, cached_tokens), bisect_left(TIME_CELLS_S, ttft_s)
        self._add(ref, VersionCounts(1, prompt_tokens, cached_tokens, warm, ttft_s, {cell: 1}))

    def correct(self, ref: str, counted_tokens: int, cached_tokens: int) -> None:
        """Count a request's cached tokens that were counted as ``counted_tokens`` before."""
        warm = self._is_warm(ref, cached_tokens) - self._is_warm(ref, counted_tokens)
        self._add(ref, VersionCounts(0, 0, cached_tokens - counted_tokens, warm))

    def _is_warm(self, ref: str, cached_tokens: int) -> int:
        return int(cached_tokens >= max(1, self._least_tokens(ref)))

    def _add(self, ref: str, more: VersionCounts) -> None:
        self._figures[ref] = self._figures.pop(ref, VersionCounts()).plus(more)
        if len(self._figures) > MAX_FIGURES:
            self._figures.popitem(last=False)

    def add_use(self, ref: str, use: Use, *, public: bool) -> None:
        """Record a use of a prompt. A public prompt's KV is the same for all tenants and salts."""
        uses = self._uses.setdefault(ref.partition("@")[0], OrderedDict())
        way = use._replace(tenant="", cache_salt=None) if public else use
        uses[way] = use
        uses.move_to_end(way)
        if len(uses) > 16:
            uses.popitem(last=False)

    def report(self) -> tuple[dict[str, VersionCounts], dict[str, list[Use]]]:
        """Return the figures by version, and each name's uses, the latest last."""
        return dict(self._figures), {name: list(uses.values()) for name, uses in self._uses.items()}


def version_samples(report: Mapping[str, VersionCounts]) -> Iterable[Sample]:
    """Yield the tokens, requests and times to first token of each version."""
    for ref, figures in report.items():
        labels = (("prompt", ref),)
        yield "warmpath_prompt_version_tokens_total", labels, float(figures.prompt_tokens)
        yield "warmpath_prompt_version_cached_tokens_total", labels, float(figures.cached_tokens)
        yield "warmpath_prompt_version_requests_total", labels, float(figures.requests)
        yield "warmpath_prompt_version_ttft_seconds_total", labels, figures.ttft_s


def merged(reports: Iterable[Mapping[str, VersionCounts]]) -> dict[str, VersionCounts]:
    """Return the summed figures of several ingresses."""
    totals: dict[str, VersionCounts] = {}
    for report in reports:
        for ref, figures in report.items():
            totals[ref] = totals.get(ref, VersionCounts()).plus(figures)
    return totals


logger = logging.getLogger(__name__)


class PromptNotFound(NotFound):
    """A request refers to a prompt that is not registered or belongs to another tenant."""

    code = "prompt_not_found"


class Prompts:
    """All prompts of a deployment, formatted daily because templates may write the date. ``cutovers``: by name."""

    def __init__(
        self,
        configs: Iterable[PublicPromptConfig] = (),
        locked: Iterable[Prompt] = (),
        cutovers: Cutovers | None = None,
        *,
        today: Callable[[], date] = date.today,
    ) -> None:
        self._configs, self._locked = tuple(configs), tuple(locked)
        self._prompts = _merged(self._configs, self._locked)
        self.cutovers = cutovers or Cutovers()
        self.cutovers.check({prompt.ref for prompt in self._locked})
        self._today = today
        self._tokens: dict[str, int] = {}
        self._formatted: tuple[str, ...] = ()
        self._formatted_on: date | None = None
        self._lock = asyncio.Lock()

    @classmethod
    def of(cls, configs: Iterable[PublicPromptConfig], directory: Path | None) -> Prompts:
        """Return the prompts of the settings, and of a directory if given. Raises PromptError."""
        if directory is None:
            return cls(configs)
        return cls(configs, PromptDirectory(directory).read(), read_cutovers(directory))

    def __bool__(self) -> bool:
        return any(prompt.tenant is None for prompt in self._prompts.values())

    def all(self) -> Mapping[str, Prompt]:
        """Return all prompts by reference, including private ones."""
        return self._prompts

    def tokens(self, ref: str) -> int:
        """Return the number of tokens of a prompt's own text, 0 for an unregistered one."""
        return self._tokens.get(ref, 0)

    def least_tokens(self, ref: str, block_size: int) -> int:
        """Return the cached tokens that imply a fully cached prompt: one block less, as the last token may merge."""
        return max(0, self.tokens(ref) // block_size - 1) * block_size

    def find(self, ref: str, tenant: str = "", key: str = "") -> Prompt:
        """Return a tenant's prompt for NAME@VERSION or NAME. Raises InvalidRequest and PromptNotFound.

        ``key``: of the conversation, see ``Cutovers.version``.
        """
        name, separator, version = ref.partition("@")
        if not name or (separator and not version):
            raise InvalidRequest(
                "prompt_ref must be NAME@VERSION, or NAME for the promoted version.", param="prompt_ref"
            )
        if not separator:
            version = self.cutovers.version(name, tenant, key)
        prompt = self._prompts.get(f"{name}@{version}")
        if prompt is None or prompt.tenant not in (None, tenant):
            versions = [other for other in self._prompts.values() if other.name == name]
            visible = [other.ref for other in versions if other.tenant in (None, tenant)]
            lead = "known versions" if separator else "none of it is promoted; name a version"
            hint = f"{lead}: {', '.join(visible[:8])}" if visible else "no version of it is registered"
            raise PromptNotFound(f"There is no prompt {ref[:160]!r}; {hint}.", param="prompt_ref")
        return prompt

    def is_public(self, system_text: str) -> bool:
        """Return whether a formatted system prompt equals a registered public one."""
        return system_text in self._formatted

    async def replace(
        self,
        tokenizer: PromptTokenizer,
        configs: Sequence[PublicPromptConfig] | None = None,
        locked: Sequence[Prompt] | None = None,
    ) -> None:
        """Replace the prompts of the same source. Raises PromptError, and then changes nothing."""
        async with self._lock:
            now = (
                tuple(self._configs if configs is None else configs),
                tuple(self._locked if locked is None else locked),
            )
            if now != (self._configs, self._locked):
                prompts = _merged(*now)
                self.cutovers.check({prompt.ref for prompt in now[1]})
                await asyncio.to_thread(self._install, prompts, tokenizer)
                self._configs, self._locked = now

    def switch(self, cutovers: Cutovers) -> bool:
        """Use a newer state from the next request on. Return False for an older one. Raises PromptError."""
        if not cutovers.newer_than(self.cutovers):
            return False
        cutovers.check({prompt.ref for prompt in self._locked})
        self.cutovers = cutovers
        return True

    async def keep_current(self, tokenizer: PromptTokenizer) -> None:
        """Format the prompts, unless that was already done today."""
        if self._prompts and self._formatted_on != self._today():
            async with self._lock:
                if self._formatted_on != self._today():
                    await asyncio.to_thread(self.install, tokenizer)

    def install(self, tokenizer: PromptTokenizer) -> None:
        """Format and tokenize every prompt, and register public ones with the tokenizer, for chats and bare text."""
        self._install(self._prompts, tokenizer)

    def _install(self, prompts: dict[str, Prompt], tokenizer: PromptTokenizer) -> None:
        today = self._today()
        public = {ref: prompt.text for ref, prompt in prompts.items() if prompt.tenant is None}
        chats = [text for text in (_chat_text(tokenizer, ref, text) for ref, text in public.items()) if text]
        formatted = (*chats, *public.values())
        # The tokenizer caches these calls under a random root that no request uses.
        root = secrets.token_bytes(16)
        if (prompts, formatted) != (self._prompts, self._formatted) or self._formatted_on is None:
            bare = {
                ref: tokenizer.encode(prompt.text, root, add_special_tokens=True).identity
                for ref, prompt in prompts.items()
            }
            self._tokens = {ref: len(ids) for ref, ids in bare.items()}
            if formatted != self._formatted:
                of_chats = (tokenizer.encode(text, root).identity for text in chats)
                tokenizer.set_public([*of_chats, *(bare[ref] for ref in public)])
                self._formatted = formatted
        self._prompts = prompts
        self._formatted_on = today


def _merged(configs: Iterable[PublicPromptConfig], locked: Iterable[Prompt]) -> dict[str, Prompt]:
    prompts = {config.ref: Prompt(config.name, config.version, config.text) for config in configs}
    for prompt in locked:
        if prompt.ref in prompts:
            raise PromptError(f"{prompt.ref} is in public_prompts and in prompts_dir; remove one")
        prompts[prompt.ref] = prompt
    return prompts


def _chat_text(tokenizer: PromptTokenizer, ref: str, text: str) -> str:
    try:
        return tokenizer.template.render([{"role": "system", "content": text}], add_generation_prompt=False).system_text
    except InvalidRequest as error:
        logger.warning("public prompt %s is not recognised in chats: %s", ref, error.message)
        return ""
