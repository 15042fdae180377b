"""Regular expressions take time that grows with a text and no faster, whatever the text repeats.

Each one of the product is found in its source. It gets parts of what it matches, repeated behind the parts before them:
that is what makes a search go back, or begin anew at every character.
"""

import ast
import importlib
import re
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness.growth import grows_too_fast

ROOT = Path(__file__).parents[2]
BOUNDED = {
    "serve_app/config/quantities.py": "settings, of 32 characters at most",
    "serve_app/cache_misses/documents.py": "strings in JSON that has been read, so that each one ends",
}
"""Files with patterns that are not linear, and the texts that they see instead of any text."""
CALL = re.compile(r"\bre\.(?:compile|match|search|fullmatch|findall|finditer|split|sub)\(")
SOURCES = sorted(
    path for folder in ("router", "serve_app") for path in (ROOT / folder).rglob("*.py")
    if CALL.search(path.read_text()) and str(path.relative_to(ROOT)) not in BOUNDED
)  # fmt: skip
FLAGS_AT = {"compile": 1, "match": 2, "search": 2, "fullmatch": 2, "findall": 2, "finditer": 2, "split": 3, "sub": 4}
"""The functions of ``re`` with a pattern, and the place of their flags."""
MOST_SAMPLES, SAMPLE_CHARS, SAMPLE_PARTS = 4, 40, 120
QUICK_CHARS, MOST_CHARS = 2048, 1 << 16
QUICK_S = 0.002
"""Of a text of ``QUICK_CHARS``. What takes no longer is not quadratic."""

MADE_LATER = {
    r're.search(rf"(?<![a-z0-9]){re.escape(part)}", text)': r"(?<![a-z0-9])pin",
    r're.search(rf"(?<!\w){re.escape(place.keyword)}\b", said)': r"(?<!\w)unevaluatedProperties\b",
    r're.findall(rf"^{metric}(?:\{{.*\}})? ([0-9.e+]+)$", text, re.MULTILINE)': r"^requests(?:\{.*\})? ([0-9.e+]+)$",
    're.compile(b"|".join(re.escape(content.encode()) for content in contents))': rb"<\|im_start\|>|<\|im_end\|>|<s>",
}
"""Patterns that are made in a function, and an example of each."""


class Found(NamedTuple):
    """A pattern, and the methods that it is used by, none: unknown."""

    pattern: re.Pattern[Any]
    methods: frozenset[str]


def patterns_of(path: Path) -> Iterator[Found]:
    """Yield the patterns that a file of the product makes. Raises NameError for one that is made later."""
    source = path.read_text()
    tree = ast.parse(source)
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    used: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            name = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            used.setdefault(name, set()).add(node.attr)
    named = {id(node.value): node.targets[0].id for node in ast.walk(tree)
             if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}  # fmt: skip
    listed = [*_patterns_in([value for name, value in vars(module).items() if not name.startswith("__")], 6)]
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
                and node.func.attr in FLAGS_AT):  # fmt: skip
            continue
        said, name = ast.get_source_segment(source, node) or "", node.func.attr
        if said in MADE_LATER:
            yield Found(re.compile(MADE_LATER[said]), frozenset())
            continue
        at = FLAGS_AT[name]
        flags = next((word.value for word in node.keywords if word.arg == "flags"), *node.args[at : at + 1] or [None])
        try:
            text, flag = (_value(one, vars(module)) for one in (node.args[0], flags))
        except NameError:  # of a loop over patterns in the module
            assert name == "compile" and listed, f"name an example of {said} in MADE_LATER"
            yield from (Found(pattern, frozenset()) for pattern in listed)
            continue
        methods = used.get(named.get(id(node), ""), set()) & FLAGS_AT.keys() if name == "compile" else {name}
        yield Found(re.compile(text, flag), frozenset(methods))


def _value(node: ast.expr | None, names: dict[str, Any]) -> Any:
    return 0 if node is None else eval(ast.unparse(node), names)  # noqa: S307  # the product's own source


def _patterns_in(value: Any, depth: int) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif depth and isinstance(value, dict | list | tuple | set | frozenset):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _patterns_in(one, depth - 1)


PARSER: Any = importlib.import_module("re._parser")
CATEGORIES = {
    "CATEGORY_DIGIT": (r"\d", "7"), "CATEGORY_SPACE": (r"\s", " "), "CATEGORY_WORD": (r"\w", "a"),
    "CATEGORY_NOT_DIGIT": (r"\D", "a"), "CATEGORY_NOT_SPACE": (r"\S", "a"), "CATEGORY_NOT_WORD": (r"\W", "-"),
}  # fmt: skip
"""As a class, and a character of it."""


def sample(parsed: Any, number: int) -> str:
    """Return a text that a pattern matches: one of its alternatives, with each repetition once or twice."""
    return "".join(_sample(str(kind), value, number) for kind, value in parsed)[:SAMPLE_CHARS]


def _sample(kind: str, value: Any, number: int) -> str:
    match kind:
        case "LITERAL":
            return chr(value)
        case "ANY":
            return "a"
        case "NOT_LITERAL":
            return "b" if chr(value) == "a" else "a"
        case "IN":
            return _member(value, number)
        case "BRANCH":
            return sample(value[1][number % len(value[1])], number)
        case "SUBPATTERN":
            return sample(value[-1], number)
        case "ATOMIC_GROUP":
            return sample(value, number)
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            least, most, repeated = value
            return sample(repeated, number) * min(most, max(least, 1 + number % 2))
        case "AT" | "ASSERT" | "ASSERT_NOT" | "GROUPREF":
            return ""
    raise AssertionError(f"{kind} has no sample yet")


def _member(parts: Any, number: int) -> str:
    """Return a character of a class."""
    negated = str(parts[0][0]) == "NEGATE"
    members = parts[1:] if negated else parts
    if negated:
        inside = re.compile("[" + "".join(map(_class, members)) + "]")
        return next(char for char in 'a -\n7b"_\u00e9' if not inside.match(char))
    kind, value = members[number % len(members)]
    return CATEGORIES[str(value)][1] if str(kind) == "CATEGORY" else chr(value[0] if str(kind) == "RANGE" else value)


def _class(member: Any) -> str:
    kind, value = str(member[0]), member[1]
    if kind == "CATEGORY":
        return CATEGORIES[str(value)][0]
    one = (value, value) if kind == "LITERAL" else value
    return f"{re.escape(chr(one[0]))}-{re.escape(chr(one[1]))}"


def hostile(pattern: re.Pattern[Any]) -> Iterator[tuple[str, str]]:
    """Yield (what stands before, what is repeated): parts of texts that the pattern matches."""
    text = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    parsed = PARSER.parse(text, pattern.flags & ~re.UNICODE if isinstance(pattern.pattern, bytes) else pattern.flags)
    samples = dict.fromkeys(sample(parsed, number) for number in range(MOST_SAMPLES))
    parts = dict.fromkeys((one[:i], one[i:j]) for one in samples for i, j in combinations(range(len(one) + 1), 2))
    repeated = dict.fromkeys(("", part) for _, part in parts if len(part) <= 2)
    chosen = [*repeated, *parts]
    return iter(chosen[:: max(1, len(chosen) // SAMPLE_PARTS)])


def worked(found: Found, before: str, part: str, size: int) -> None:
    """Use a pattern in all ways that it is used in, on a text that it almost matches."""
    text: Any = before + part * (size // len(part)) + "\0"
    if isinstance(found.pattern.pattern, bytes):
        text = text.encode("latin-1")
    methods = found.methods or {"finditer", "fullmatch"}
    if "match" in methods:
        found.pattern.match(text)
    if "fullmatch" in methods:
        found.pattern.fullmatch(text)
    if methods - {"match", "fullmatch"}:
        for _ in found.pattern.finditer(text):
            pass


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_patterns_are_linear(path: Path) -> None:
    """A search that begins anew at each character, and goes on to the end, is a square of the text."""
    product, wrong = [*patterns_of(path)], list[str]()
    assert product
    for found in product:
        for before, part in hostile(found.pattern):
            begun_s = time.thread_time()
            worked(found, before, part, 256)
            worked(found, before, part, QUICK_CHARS)
            if time.thread_time() - begun_s > QUICK_S and (
                said := grows_too_fast(lambda size: worked(found, before, part, size), MOST_CHARS)  # noqa: B023
            ):
                wrong.append(f"{found.pattern.pattern!r}, {before!r} and {part!r} repeated: {said}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("pattern", [r"a+b", r"\s*\n\s*x", r"(?:git:.*\n)*```", "(?s)a.*b.*c", r"^(a|aa)+$"])
def test_what_is_not_linear_is_found(pattern: str) -> None:
    """This test's own search, over patterns known as bad."""
    found = Found(re.compile(pattern), frozenset())
    assert any(
        grows_too_fast(lambda size: worked(found, before, part, size), MOST_CHARS)  # noqa: B023
        for before, part in hostile(found.pattern)
    )
