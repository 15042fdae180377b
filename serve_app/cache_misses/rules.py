"""The rules of what changes between prompts, for the miss report and `warmpath prompts lint`: kinds, causes, remedies.

``classify`` names the first difference of two texts. ``written`` finds in one text what will differ in the next.
"""

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

DifferenceKind = Literal["time", "id", "user"]
"""The kind of a value that changes between requests: a date, time or timestamp; a UUID, or a separate number; an e-mail
address, or the name of whom the model talks to."""
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
_PERSON = (
    r"(?i:\buser(?:'s)?[ _-]?(?:full[ _-]?)?name(?: is|\s?[:=])|\b(?:the|your|this|current) (?:user|customer|client) is"
    r"(?: called| named)?|\b(?:you are )?(?:talking|speaking|chatting) (?:to|with)|\byou (?:assist|help)"
    r"|\b(?:assisting|helping)) (?P<value>[A-Z][\w'’-]*(?: [A-Z][\w'’-]*){0,2})(?=[.,;:!()<\n]|\s*\Z)"
)
_PATTERNS: tuple[tuple[DifferenceKind, re.Pattern[str]], ...] = (
    ("id", re.compile(r"(?<![0-9a-f])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f])", re.I)),
    ("id", re.compile(r"(?<![0-9A-Za-z])0[0-7][0-9A-HJKMNP-TV-Z]{24}(?![0-9A-Za-z])")),  # a ULID
    ("user", re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,4}")),
    ("user", re.compile(_PERSON)),
    *(("time", re.compile(rf"(?<![a-su-z0-9.:]){pattern}", re.I)) for pattern in _TIMES),
    ("id", re.compile(_NUMBER)),
)
_SPACE = re.compile(r"[\s\u200b\u200c\u200d\u2060\ufeff]+")
_WORDS = re.compile(r"\w+|[^\w\s,]")
_WORD_THERE = re.compile(r"\s*\S+|\s+")


class Value(NamedTuple):
    """A value of a text, from the character ``start`` on."""

    kind: DifferenceKind
    start: int
    text: str


def _values(text: str, start: int, end: int) -> Iterator[Value]:
    for kind, pattern in _PATTERNS:
        group = "value" if "value" in pattern.groupindex else 0
        for match in pattern.finditer(text, start, end):
            yield Value(kind, match.start(group), match.group(group))


def _values_at(text: str, at: int) -> Iterator[Value]:
    """Yield the values that contain the character at ``at``, or end there."""
    for value in _values(text, max(0, at - VALUE_CHARS), at + VALUE_CHARS):
        if value.start <= at <= value.start + len(value.text):
            yield value


def classify(new: str, old: str, at: int) -> Difference:
    """Return the class of the difference at ``at`` between two texts that are equal before it."""
    if _differs_in_space(new, old, at):
        return "whitespace"
    before = {(kind, start): value for kind, start, value in _values_at(old, at)}
    for kind, start, value in _values_at(new, at):
        if before.get((kind, start), value) != value:
            return kind
    return "reordered" if _is_reordered(new, old, at) else "text"


def value_there(text: str, at: int) -> str:
    """Return the value at a place of a text, or the rest of the word there, at most 64 characters."""
    for _, _, value in _values_at(text, at):
        return value[:64]
    word = _WORD_THERE.match(text, at)
    return word.group()[:64] if word else ""


def _differs_in_space(new: str, old: str, at: int) -> bool:
    rests = [text[at : at + 16 * SPACE_CHARS] for text in (new, old)]
    # At a place between two words, either text may have the space.
    if not any(_SPACE.match(rest) for rest in rests):
        return False
    new_words, old_words = (_SPACE.sub("", rest)[:SPACE_CHARS] for rest in rests)
    return new_words == old_words != ""


def _is_reordered(new: str, old: str, at: int) -> bool:
    """Return whether the lines from the place on are equal in another order, or the fields of one JSON line."""
    start = new.rfind("\n", 0, at) + 1
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

REMEDIES: dict[MissReason, str] = {
    "time": "Move the date or time after the parts that stay the same, best into the last user message, or remove it "
    "from the prompt.",
    "id": "Remove changing ids and numbers from the prompt, or move them into the last user message.",
    "user": "Move what is said of one user behind the parts that all users share, best into the first user message.",
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

CAUSES: dict[MissReason, str] = {
    "time": "a date or time changes",
    "id": "an id or number changes",
    "user": "it differs between users",
    "whitespace": "spaces or line ends differ",
    "reordered": "the same lines or fields stand in another order",
    "text": "the text changes",
    "salt": "the cache_salt differs",
    "adapter": "the adapter differs",
}
"""Why the text behind a place is computed again."""

_PLACEHOLDER = re.compile(
    r"\{\{-?\s*+([^{}\n]{1,80}?)\s*-?\}\}|\$\{([^{}\n]{1,80})\}|<%=?\s*+([^%\n]{1,80}?)\s*%>"
    r"|%\((\w{1,60})\)[sd]|\{([A-Za-z_][\w.()!:%-]{0,60})\}|\$\((date\b[^()\n]{0,60})\)"
)
_NAMES: dict[DifferenceKind, re.Pattern[str]] = {
    "time": re.compile(
        r"(?<![a-z])(?:date|today|day|weekday|yesterday|tomorrow|now|time|datetime|clock|strftime|utcnow)(?![a-z])"
        r"|timestamp|epoch|unixtime",
        re.I,
    ),
    "id": re.compile(
        r"uuid|guid|ulid|nonce|(?:request|session|trace|conversation|run|message|thread)_?id"
        r"|counter|(?<![a-z])(?:turn|attempt|iteration)",
        re.I,
    ),
    "user": re.compile(r"(?<![a-z])(?:user|customer|client|account|member|employee|email)(?![a-rt-z])", re.I),
}
"""The names of a placeholder for a value of each kind; the first that fits counts."""
_LASTING = re.compile(r"zone|timeout|limit|format|birth|delivery|response|max|created", re.I)
_OF_NOW: dict[DifferenceKind, re.Pattern[str]] = {
    "time": re.compile(
        r"\b(?:today|now|current(?:ly)?|as of|generated|rendered|it is|date|time|timestamp)\b|今天|现在|오늘|今日", re.I
    ),
    "id": re.compile(
        r"(?:request|session|trace|turn|attempt|message|visit|iteration|conversation|run|thread|user|counter|id|key)"
        r"[\s=:]*+(?:no\.|number|id|#)?[\s=:]*+$|#\s*+$",
        re.I,
    ),
    "user": re.compile(r"\b(?:user|customer|client|account|you|signed in|logged in|assisting|helping)\b", re.I),
}
"""What stands in a line before a value that will differ in the next request."""
_ODD_SPACES = re.compile(r"(?<![ \t])[ \t]++(?=\r?$)|[\u00a0\u2000-\u200d\u2060\ufeff]", re.M)


class Written(NamedTuple):
    """A place in a prompt's text that will differ later. ``found``: its text. ``what``: a few words on it."""

    reason: MissReason
    char: int
    found: str
    what: str


def written(text: str, constants: Collection[str] = (), *, template: bool = False) -> list[Written]:
    """Return what will not be the same in each request, in the order of the text, one for each place.

    A date by itself may be a document's own; only what its line says is of now counts. ``template``: placeholders and
    spaces of its file count too, but not the placeholders named in ``constants``.
    """
    found = [*_of_now(text), *(_of_template(text, constants) if template else ())]
    by_place = {one.char: one for one in reversed(found)}
    return [by_place[char] for char in sorted(by_place)]


def _of_now(text: str) -> Iterator[Written]:
    for kind, start, value in _values(text, 0, len(text)):
        person = kind == "user" and "@" not in value
        before = text[max(0, start - 60) : start].rpartition("\n")[2]
        if person or _OF_NOW[kind].search(before):
            yield Written(kind, start, value[:64], CAUSES[kind])


def _of_template(text: str, constants: Collection[str]) -> Iterator[Written]:
    for match in _PLACEHOLDER.finditer(text):
        name = match.group(match.lastindex or 0)
        if name in constants:
            continue
        kinds = (named for named, names in _NAMES.items() if names.search(name) and not _LASTING.search(name))
        kind: Difference = next(kinds, "text")
        said = f"a placeholder: {CAUSES[kind]} (else: --constant {shlex.quote(name)})"
        yield Written(kind, match.start(), match.group()[:64], said)
    odd = list(_ODD_SPACES.finditer(text))
    if odd:
        char = odd[0].group()
        what = "spaces at the end of a line" if char[0] in " \t" else f"the invisible character U+{ord(char):04X}"
        said = f"{what}, which editors change" + (f" ({len(odd)} places)" if len(odd) > 1 else "")
        yield Written("whitespace", odd[0].start(), char, said)
    if "\r\n" in text and (lone := re.search(r"(?<!\r)\n", text)):
        yield Written("whitespace", lone.start(), "\n", "a line ends with LF, others with CR LF")
