"""What keeps prompts out of the cache is found in files, with its place and cost; what only looks like it is not."""

import io
import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from serve_app.cache_misses.documents import Located, located, prompts_of
from serve_app.cache_misses.lint import MAX_FINDINGS, ChangingPlace, Linter, LintReport, RoughTokens
from serve_app.cache_misses.rules import CAUSES, REMEDIES, written
from serve_app.cli.main import app
from serve_app.errors import InvalidRequest
from serve_app.prompts.worth import SHORT_TOKENS, too_few_reads, too_short

RULES = "Answer politely, and quote the section that you rely on. " * 30


def lint(*files: Path, constants: tuple[str, ...] = ()) -> LintReport:
    return Linter(RoughTokens(), constants).read(files)


def only(report: LintReport) -> ChangingPlace:
    (finding,) = report.findings
    return finding


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("Today is {{ current_date }}.", "time"),
        ("Now: ${NOW}", "time"),
        ("It is {datetime.now():%H:%M}.", "time"),
        ("Made $(date +%F)", "time"),
        ("id {request_id}", "id"),
        ("<%= session_id %>", "id"),
        ("You help {{ user.name }}.", "user"),
        ("Mail: %(email)s", "user"),
        ("Today is 2026-11-22.", "time"),
        ("Session 6f1c1d1e-0d5f-4c3e-9a53-0a5b8a2a9c11", "id"),
        ("timestamp: 1763800000", "time"),
        ("This is request #41", "id"),
        ("You are talking to Ada Lovelace.", "user"),
        ("The user is signed in as ada@example.com.", "user"),
        ("The user's name is Ada", "user"),
        ("A line. ", "whitespace"),
        ("A\u00a0line.", "whitespace"),
        ("A line.\r", "whitespace"),
        ("Use {{ context }} here.", "text"),
    ],
)
def test_what_changes_is_found(tmp_path: Path, line: str, reason: str) -> None:
    """In a prompt's file, with its line, the text there and the tokens behind it."""
    file = tmp_path / "prompt.txt"
    file.write_bytes(f"First.\n{line}\n{RULES.rstrip()}\n".encode())
    finding = only(lint(file))
    assert (finding.reason, finding.line, finding.seen) == (reason, 1 if line.endswith("\r") else 2, False)
    assert finding.lost_tokens == pytest.approx(len(RoughTokens().encode(RULES)), rel=0.05)
    assert finding.found in file.read_bytes().decode()


@pytest.mark.parametrize(
    "line",
    [
        "The policy of 2024-01-05 holds.",
        "Use {{ user_timezone }}.",
        "Version 1.2.3, price $4.90, ratio 16:9, phone (415) 555-0100.",
        "Step 3: answer in at most 200 words.",
        '{"timeout": 30, "unit": "s"}',
        "You are talking to English learners. You help Customers of the bank with their cards.",
        "User: May I return a book?",
        "Write to help@example.com for more.",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    ],
)
def test_what_stays_is_no_finding(tmp_path: Path, line: str) -> None:
    """Dates of documents, versions, prices, limits, digests, and names of nobody in particular."""
    file = tmp_path / "prompt.txt"
    file.write_text(f"First.\n{line}\nLast.\n")
    assert lint(file).findings == []


def test_an_open_place_at_the_end_costs_nothing_and_a_constant_never_changes(tmp_path: Path) -> None:
    file = tmp_path / "prompt.md"
    file.write_text(f"{RULES.rstrip()}\n{{{{ question }}}}\n")
    assert lint(file).findings == []
    file.write_text(f"You work for {{{{ company }}}}.\n{RULES.rstrip()}\n")
    assert only(lint(file)).reason == "text"
    assert lint(file, constants=("company",)).findings == []


@pytest.mark.parametrize("name", ["company", "settings.company_that_this_clerk_works_for.name", "company | upper"])
def test_the_option_that_a_finding_names_works_as_printed(name: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.md"
    file.write_text(f"You work for {{{{ {name} }}}}.\n{RULES.rstrip()}\n")
    printed = only(lint(file)).what.rpartition("(else: ")[2].removesuffix(")")
    option, value = shlex.split(printed)
    assert option == "--constant" and lint(file, constants=(value,)).findings == []


def chat(system: str, question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages, **more}


def messages(system: str, question: str, **more: Any) -> dict[str, Any]:
    blocks = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
    asked = [{"role": "user", "content": [{"type": "text", "text": question}]}]
    return {"model": "m", "max_tokens": 8, "system": blocks, "messages": asked, **more}


def response(system: str, question: str, **more: Any) -> dict[str, Any]:
    asked = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": question}]}]
    return {"model": "m", "instructions": system, "input": asked, **more}


def completion(system: str, question: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": f"{system}\n{question}", **more}


Form = Callable[..., dict[str, Any]]
FORMS = (chat, messages, response, completion)
WAYS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "lines": json.dumps,
    "batch": lambda body: json.dumps({"custom_id": "1", "url": "/v1/chat/completions", "body": body}),
    "log": lambda body: f"2026-11-28T10:00:00 INFO [7] {{retries}} request={json.dumps(body)} took=3ms",
    "text in a log": lambda body: json.dumps({"level": "info", "ts": 3, "request": {"raw": json.dumps(body)}}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_requests_are_compared_in_every_form(tmp_path: Path, form: Form, way: str) -> None:
    """A clock at the top costs all that stands behind it, after the first request; a new question costs none."""
    file = tmp_path / "requests.log"
    asked = [form(f"You are a clerk.\nIt is 10:0{minute}. {RULES}", f"Question {minute}?") for minute in range(5)]
    file.write_text("starting\n" + "".join(f"{WAYS[way](body)}\n" for body in asked))
    report = lint(file)
    finding = only(report)
    assert (finding.reason, finding.line, finding.part_line, finding.seen) == ("time", 3, 2, True)
    assert finding.found == "10:01" and len(finding.lost) == 4
    assert finding.lost_tokens == pytest.approx(len(RoughTokens().encode(RULES)), rel=0.05)
    assert (report.prompts, report.lost_tokens) == (5, sum(finding.lost.values()))
    file.write_text("".join(f"{WAYS[way](form(RULES, f'Question {at}?'))}\n" for at in range(5)))
    assert lint(file).findings == []


@pytest.mark.parametrize("form", FORMS)
def test_a_document_of_many_lines_tells_the_line_of_the_string(tmp_path: Path, form: Form) -> None:
    """One request whose system prompt has the date of today, in JSON that is written with line ends."""
    file = tmp_path / "request.json"
    file.write_text(json.dumps([form(f"Be brief.\nToday is 2026-11-28.\n{RULES}", "Hi?")], indent=2))
    finding = only(lint(file)) if form is not completion else None
    if finding is not None:  # a completion may end with a date
        line = file.read_text().split("\n")[finding.line - 1]
        assert "Today is 2026-11-28" in line and (finding.part_line, finding.reason) == (2, "time")


def tool(name: str) -> dict[str, Any]:
    words = "It reads what the path names, and tells what it found there, or why it did not. " * 4
    return {"type": "function", "function": {"name": name, "description": words}}


@pytest.mark.parametrize(
    ("one", "other", "reason", "part"),
    [
        (chat(RULES, "a", tools=[tool("read"), tool("write")]), chat(RULES, "b", tools=[tool("write"), tool("read")]),
         "reordered", "tools[0]"),
        (chat('{"a": 1, "b": 2}\n' + RULES, "a"), chat('{"b": 2, "a": 1}\n' + RULES, "b"), "reordered", "messages[0]"),
        (messages("Be  brief. " + RULES, "a"), messages("Be brief. " + RULES, "b"), "whitespace", "system"),
        (messages("Be brief.\r\n" + RULES, "a"), messages("Be brief.\n" + RULES, "b"), "whitespace", "system"),
        (chat("Turn 1. " + RULES, "a"), chat("Turn 2. " + RULES, "b"), "id", "messages[0]"),
        (chat("Mail ada@a.example. " + RULES, "a"), chat("Mail bob@b.example. " + RULES, "b"), "user", "messages[0]"),
        (chat("Be kind to ada. " + RULES, "a", user="u1"), chat("Be kind to bob. " + RULES, "b", user="u2"),
         "user", "messages[0]"),
        (chat("Be kind to ada. " + RULES, "a", user="u1"), chat("Be kind to bob. " + RULES, "b", user="u1"),
         "text", "messages[0]"),
        (chat(RULES, "a", cache_salt="x"), chat(RULES, "b", cache_salt="y"), "salt", "messages[0]"),
    ],
)  # fmt: skip
def test_drift_between_two_requests(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], reason: str, part: str
) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(f"{json.dumps(one)}\n{json.dumps(other)}\n")
    finding = [finding for finding in lint(file).findings if finding.seen]
    assert [(found.reason, found.part, found.line) for found in finding] == [(reason, part, 2)]
    assert finding[0].lost_tokens > 300


def test_models_do_not_share_and_versions_differ_on_purpose(tmp_path: Path) -> None:
    """Requests to two models, and two prompts of a folder with other words, are no drift; other spaces are."""
    file = tmp_path / "requests.jsonl"
    asked = [chat(f"{name}. {RULES}", "a", model=name) for name in ("one", "two")]
    file.write_text("".join(f"{json.dumps(body)}\n" for body in asked))
    assert lint(file).findings == []
    folder = tmp_path / "prompts"
    for name, text in (("clerk/1", "Be brief. "), ("clerk/2", "Be kind. "), (".locked/x", "Be  kind. ")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(text + RULES.rstrip())
    assert lint(folder).findings == []
    (folder / "clerk/3.txt").write_text("Be  kind. " + RULES.rstrip())
    assert only(lint(folder)).reason == "whitespace"


def test_a_conversation_that_grows_loses_nothing(tmp_path: Path) -> None:
    """Unless the client changes what it sent before."""
    file = tmp_path / "requests.jsonl"
    turns = [{"role": "user" if at % 2 == 0 else "assistant", "content": f"Word {at}. {RULES}"} for at in range(9)]
    bodies = [{"model": "m", "messages": turns[:until]} for until in (1, 3, 5, 7, 9)]
    file.write_text("".join(f"{json.dumps(body)}\n" for body in bodies))
    assert lint(file).findings == []
    turns[2] = {"role": "user", "content": f"Word 2, at 10:00. {RULES}"}
    file.write_text(file.read_text() + json.dumps({"model": "m", "messages": turns}) + "\n")
    assert (only(lint(file)).part, only(lint(file)).line) == ("messages[2]", 6)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


@given(JSON, st.sampled_from([None, 1, 4]), st.booleans())
def test_each_string_knows_its_line(value: Any, indent: int | None, ascii_only: bool) -> None:
    """The document is the one that json reads; a string's own characters stand in the line that it names."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    lines = text.split("\n")

    def walk(inner: Any) -> None:
        if isinstance(inner, dict):
            for name, below in inner.items():
                walk(name)
                walk(below)
        elif isinstance(inner, list):
            for below in inner:
                walk(below)
        elif isinstance(inner, str):
            assert isinstance(inner, Located)
            assert json.dumps(str(inner), ensure_ascii=ascii_only) in lines[inner.line - 1]

    found = located(text)
    assert found == value
    walk(found)


@given(st.text(max_size=200))
def test_rough_tokens_are_the_text(text: str) -> None:
    tokens = RoughTokens()
    assert tokens.decode(tokens.encode(text).tolist()) == text


@given(st.text(max_size=200), st.booleans())
def test_a_place_is_in_the_text(text: str, template: bool) -> None:
    """Whatever stands in a file: each place has the text that is told of it, and there is one for each."""
    found = written(text, template=template)
    assert all(text.startswith(one.found, one.char) for one in found)
    assert len({one.char for one in found}) == len(found)
    assert all(one.reason in CAUSES and one.reason in REMEDIES for one in found)


def test_short_prompts_and_rare_reads_are_told() -> None:
    """Below a block nothing is cached; below break-even, writing costs more than it saves."""
    assert "less than a block" in too_short(15, 16) and "too short" in too_short(16, 16)
    assert too_short(SHORT_TOKENS, 16) == ""
    assert "read 0.5 times, and pays from 1" in too_few_reads(1, 2, 1.0)
    assert {too_few_reads(2, 2, 1.0), too_few_reads(0, 0, 1.0), too_few_reads(0, 9, None)} == {""}


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("none.txt", None, "cannot be read"),
        ("bytes.txt", b"\xff\xfe", "not UTF-8 at byte 0"),
        ("other.json", b'{"a": 1}', "holds no request"),
        ("text.jsonl", b"hello\n", "holds no request"),
    ],
)
def test_a_file_that_is_none_is_one_sentence(tmp_path: Path, name: str, raw: bytes | None, said: str) -> None:
    file = tmp_path / name
    if raw is not None:
        file.write_bytes(raw)
    with pytest.raises(InvalidRequest, match=said):
        list(prompts_of(file))


def run(*arguments: object, text: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["prompts", "lint", *map(str, arguments)], input=text)
    return result.exit_code, result.output


def test_the_command(tmp_path: Path) -> None:
    """Status 1 with findings, 0 without, 2 for a file that cannot be read; exact tokens if the model is named.

    docs: prompts
    """
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("You are the clerk.\n")
    bad.write_text(f"You are the clerk.\nToday is {{date}}.\n{RULES.rstrip()}\n")
    status, said = run(good)
    assert status == 0 and "note: " in said and said.endswith("prompts: 1; findings: 0\n")
    status, said = run(good, bad)
    assert status == 1 and f"{bad}:2: '{{date}}': a placeholder: a date or time changes" in said
    about = re.search(r"about ([\d,]+) tokens behind it will be", said)
    assert about is not None and "last user message" in said and run(tmp_path / "none")[0] == 2
    status, said = run(bad, "--format", "json", "--model", "demo")
    shown = json.loads(said)
    assert status == 1 and shown["exact"] and shown["findings"][0]["reason"] == "time"
    assert {"file", "line", "found", "what", "remedy", "lost_tokens"} <= shown["findings"][0].keys()
    status, said = run("-", text="".join(f"{json.dumps(chat(f'It is 10:0{at}. {RULES}', 'a'))}\n" for at in range(3)))
    assert status == 1 and "-:2: messages[0], line 1: '10:01'" in said and "in each of 2 requests" in said


def test_texts_of_a_file_are_never_commands(tmp_path: Path) -> None:
    """A value in a log cannot move a terminal's cursor."""
    file = tmp_path / "requests.jsonl"
    asked = [chat(f"Word \x1b]52;{at}\x9b2J\u202e. {RULES}", "a", user=f"\x1b{at}") for at in ("one", "two")]
    file.write_text("".join(f"{json.dumps(body, ensure_ascii=False)}\n" for body in asked))
    status, said = run(file)
    assert status == 1 and not re.search(r"[^\n\x20-\x7e\xa0-\u2027\u2030-\uffff]", said)


def test_a_long_log_lists_a_bounded_number_of_places(tmp_path: Path) -> None:
    file = io.StringIO()
    for at in range(MAX_FINDINGS + 3):
        print(f"{at}\nToday is {{date}}.", file=file)
    path = tmp_path / "prompt.txt"
    path.write_text(file.getvalue())
    report = lint(path)
    assert (len(report.findings), report.unlisted) == (MAX_FINDINGS, 3)
