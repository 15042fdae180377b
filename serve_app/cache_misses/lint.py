"""`warmpath prompts lint`: what keeps the prompts of files out of the cache, before a deploy.

Requests are compared in their order, as a server's miss report compares them, for a cache that loses nothing. A single
text is searched for what will differ in the next request. The rules are those of ``rules``.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from router.protocol.block_hash import PrefixScope, TokenArray, common_tokens
from router.settings import DEFAULTS
from serve_app.cache_misses.detector import PromptMemory
from serve_app.cache_misses.documents import DocumentPrompt, prompts_of
from serve_app.cache_misses.reasons import MIN_LOST_TOKENS, SeenPrompt, explain, is_miss
from serve_app.cache_misses.rules import CAUSES, REMEDIES, MissReason, Written, written
from serve_app.prompts.worth import too_short
from serve_app.tokenization.tokenizer import PromptTokenizer

MAX_MODELS = 8
MAX_FINDINGS = 1000
"""More places are counted, but not listed."""
_TOKEN = re.compile(r" ?[^\W\d_]{1,7}|\d{1,3}|[^\S ]+| +|.", re.S)


class Tokens(Protocol):
    """Text <-> token ids."""

    def encode(self, text: str) -> TokenArray:
        """Return a text's tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""


class RoughTokens:
    """About as many tokens as a model's own tokenizer makes of English and of code: up to seven letters each."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._texts: list[str] = []

    def encode(self, text: str) -> TokenArray:
        """Return a text's tokens."""
        ids = []
        for piece in _TOKEN.findall(text):
            number = self._ids.get(piece)
            if number is None:
                number = self._ids[piece] = len(self._texts)
                self._texts.append(piece)
            ids.append(number)
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return "".join(self._texts[number] for number in ids)


class ModelTokens:
    """A model's own tokenizer."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = PromptTokenizer(model)

    def encode(self, text: str) -> TokenArray:
        """Return a text's tokens."""
        return self._tokenizer.encode(text, bytes(16)).token_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self._tokenizer.text_of(ids)


@dataclass
class ChangingPlace:
    """One place that changes. ``line``: in the file; ``part``: of a request; ``part_line``: in that part, from 1.

    ``what``: a few words. ``seen``: it did change between two requests, else it will. ``lost``: tokens,
    by the number of the prompt.
    """

    path: Path
    line: int
    part: str
    part_line: int
    reason: MissReason
    found: str
    what: str
    seen: bool
    lost: dict[int, int] = field(default_factory=dict)
    heads: set[bytes] = field(default_factory=set)
    """The system prompts with it."""

    @property
    def lost_tokens(self) -> int:
        """The tokens that one request loses, in the median."""
        return sorted(self.lost.values())[len(self.lost) // 2] if self.lost else 0

    def shown(self) -> dict[str, Any]:
        """Return the finding as fields of JSON."""
        return {
            "file": str(self.path),
            "line": self.line,
            "part": self.part or None,
            "part_line": self.part_line,
            "reason": self.reason,
            "found": self.found,
            "what": self.what,
            "seen": self.seen,
            "remedy": REMEDIES[self.reason],
            "lost_tokens": self.lost_tokens,
            "requests": len(self.lost),
            "total_lost_tokens": sum(self.lost.values()),
        }


@dataclass
class LintReport:
    """The result. ``notes``: advice on short prompts, which is no finding; ``unlisted``: further places."""

    findings: list[ChangingPlace] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    prompts: int = 0
    prompt_tokens: int = 0
    lost_tokens: int = 0
    unlisted: int = 0


class Linter:
    """Reads prompts one after the other. ``constants``: placeholders that stay the same in all requests."""

    def __init__(self, tokens: Tokens, constants: Collection[str] = (), block_size: int = DEFAULTS.block_size) -> None:
        self._tokens = tokens
        self._constants = frozenset(constants)
        self._block_size = block_size
        self._memory = PromptMemory(lambda: MAX_MODELS)
        self._compared: dict[tuple[Any, ...], ChangingPlace] = {}
        self._written: dict[tuple[Any, ...], ChangingPlace] = {}
        self._users: dict[Path, dict[bytes, set[str]]] = {}
        """Who sends each system prompt of a file."""
        self._report = LintReport()

    def read(self, paths: Iterable[Path]) -> LintReport:
        """Return the report of all files. Raises InvalidRequest for one that cannot be read."""
        for path in paths:
            for prompt in prompts_of(path):
                self._add(prompt)
        report = self._report
        # What was seen to change needs no guess that it might.
        for finding in (self._written | self._compared).values():
            if finding.reason == "text" and self._is_users(finding):
                finding.reason, finding.what = "user", CAUSES["user"]
            report.findings.append(finding)
        report.findings.sort(key=lambda one: (str(one.path), one.line, one.part_line))
        most: dict[int, int] = {}  # what is behind two changes of a prompt is lost once
        for finding in report.findings:
            for number, lost in finding.lost.items():
                most[number] = max(most.get(number, 0), lost)
        report.lost_tokens = sum(most.values())
        return report

    def _is_users(self, finding: ChangingPlace) -> bool:
        """Return whether each system prompt with it is one user's, who has no other."""
        by_head = self._users[finding.path]
        heads = Counter(user for users in by_head.values() for user in users)
        owners = [by_head[head] for head in finding.heads]
        return all(len(users) == 1 and "" not in users and heads[min(users)] == 1 for users in owners)

    def _add(self, prompt: DocumentPrompt) -> None:
        report = self._report
        ids = self._tokens.encode(prompt.text)
        report.prompts += 1
        report.prompt_tokens += len(ids)
        head = prompt.text[: prompt.system_chars]
        family = blake2b(head.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        heads = self._users.setdefault(prompt.path, {})
        if head and family not in heads:
            self._head(prompt, head, family, first=not heads)
        heads.setdefault(family, set()).add(prompt.user)
        self._compare(prompt, ids, family)

    def _head(self, prompt: DocumentPrompt, head: str, family: bytes, *, first: bool) -> None:
        """Search a system prompt that was not there before."""
        advice = too_short(len(self._tokens.encode(head)), self._block_size)
        if advice and first:
            self._report.notes.append(f"{prompt.path}:{prompt.parts[0].line}: {advice}")
        for one in written(head, self._constants, template=prompt.template):
            behind = len(self._tokens.encode(head[one.char + len(one.found) :]))
            if one.reason == "text" and behind < MIN_LOST_TOKENS:  # an open place at the end costs nothing
                continue
            self._add_finding(self._written, prompt, one, behind, family)

    def _compare(self, prompt: DocumentPrompt, ids: TokenArray, family: bytes) -> None:
        scope = PrefixScope("", prompt.adapter, prompt.salt.encode("utf-8", "surrogatepass"))
        seen = SeenPrompt(ids, scope, prompt.system_chars, 0.0)
        room = f"{prompt.model}\0{prompt.template}"
        earlier = self._memory.prompts(room)
        cached = max((common_tokens(seen.ids, one.ids) for one in earlier if one.cache == seen.cache), default=0)
        if is_miss(len(ids), cached):
            miss = explain(seen, cached, earlier, self._tokens.decode)
            # Prompts of two files differ on purpose; what is only drift does not.
            told = miss.reason in CAUSES and (not prompt.template or miss.reason in ("whitespace", "reordered"))
            if told:
                place = miss.first_difference
                char, found = (place.char, place.found) if place is not None else (0, "")
                one = Written(miss.reason, char, found, CAUSES[miss.reason])
                self._add_finding(self._compared, prompt, one, miss.lost_tokens, family)
        self._memory.add(room, family, seen)

    def _add_finding(
        self,
        places: dict[tuple[Any, ...], ChangingPlace],
        prompt: DocumentPrompt,
        one: Written,
        lost_tokens: int,
        family: bytes,
    ) -> None:
        part = prompt.part_at(one.char)
        part_line = prompt.text.count("\n", part.start, one.char) + 1
        key = prompt.path, part.place, part_line, one.reason, one.char if prompt.template else 0
        finding = places.get(key)
        if finding is None:
            if len(places) >= MAX_FINDINGS:
                self._report.unlisted += 1
                return
            line = part.line + part_line - 1 if prompt.template else part.line
            finding = places[key] = ChangingPlace(
                prompt.path, line, part.place, part_line, one.reason, one.found, one.what, places is self._compared
            )
        finding.lost[self._report.prompts] = lost_tokens
        finding.heads.add(family)
