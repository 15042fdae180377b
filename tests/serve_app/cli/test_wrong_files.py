"""Every command that reads a user's file tells what is wrong with another one in a sentence: the file, and the line."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app

ROW = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
NOWHERE = "http://127.0.0.1:9"
TRACE = ["plan", "--memory", "80GB", "--model", "demo", "--trace"]
PREFIXES = ["plan", "--memory", "80GB", "--prefixes", "1", "--prefix-tokens", "10"]

READERS: dict[str, list[str]] = {
    "trace": TRACE,
    "plan": [*PREFIXES, "--config"],
    "model": [*PREFIXES, "--model"],
    "serve": ["serve", "--config"],
    "doctor": ["doctor", "--config"],
    "infer-settings": ["infer", __file__, "--config"],
    "check": ["check"],
    "infer": ["infer", "--url", NOWHERE],
    "bench": ["bench", "cache", "--model", "demo", "--url", NOWHERE],
    "add": ["prompts", "add", "clerk@1", "--dir", "SHELF"],
    "lint": ["prompts", "lint"],
    "verify": ["prompts", "verify", "--dir"],
}
"""By name: a command, up to its file."""
TEXTS = {"add", "lint"}
"""They take any text."""
SPEAKS_OF_PYTHON = ("Errno", "Traceback", "codec", "Error(", "JSONDecode", "KeyError", "Expecting value", "NoneType")

WRONG: dict[str, bytes] = {
    "empty": b"",
    "words": b"hello world\n",
    "null": b"null\n",
    "number": b"3\n",
    "infinite": b"1e999\n",
    "digits": b"9" * 5000 + b"\n",
    "list": b"[3]\n",
    "lists": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "bytes": bytes(range(128, 256)),
    "date": b"model: demo\nreplicas: 2020-13-45\n",
    "other": b'{"requests": 3, "applications": [3], "hidden_size": "x", "messages": 3, "hash_ids": "x"}\n',
}


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    return result.exit_code, result.output


def path_of(folder: Path, reader: str, content: bytes) -> Path:
    """Write a wrong file with the name that its reader needs; return what the command is given."""
    if reader == "verify":
        (folder / "prompts.lock").write_bytes(content)
        return folder
    file = folder / ("wrong.json" if reader == "model" else "wrong.jsonl")
    file.write_bytes(content)
    return file


def says_what_is_wrong(status: int, told: str, name: str) -> None:
    assert status in (1, 2), told
    assert name in told and "bort" not in told, told
    assert not [words for words in SPEAKS_OF_PYTHON if words in told], told
    assert len(told) < 1500 and told.count("\n") <= 8, told


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("reader", sorted(READERS.keys() - TEXTS))
def test_a_wrong_file_gets_a_sentence(reader: str, wrong: str, tmp_path: Path) -> None:
    if reader == "verify" and wrong in ("empty", "null"):
        return  # a lock without prompts
    file = path_of(tmp_path, reader, WRONG[wrong])
    if reader == "infer-settings":
        (tmp_path / "asked.jsonl").write_text('{"custom_id": "1", "url": "/v1/chat/completions", "body": {}}\n')
        status, told = run("infer", tmp_path / "asked.jsonl", "--config", file)
    else:
        status, told = run(*READERS[reader], file)
    says_what_is_wrong(status, told, "" if wrong in ("date", "other") else str(tmp_path))


@pytest.mark.parametrize("wrong", ["bytes", "no file", "a folder"])
@pytest.mark.parametrize("reader", sorted(READERS.keys() - {"infer-settings"}))
def test_what_cannot_be_read_is_named(reader: str, wrong: str, tmp_path: Path) -> None:
    """Bytes that are no text, a file that is not there, and a folder in its place."""
    command = [str(tmp_path / "shelf") if word == "SHELF" else word for word in READERS[reader]]
    if wrong == "bytes":
        file = path_of(tmp_path, reader, WRONG["bytes"])
    else:
        file = tmp_path / ("wrong.json" if reader == "model" else "wrong")
        if reader == "verify" and wrong == "a folder":
            (tmp_path / "wrong" / "prompts.lock").mkdir(parents=True)
        elif wrong == "a folder":
            if reader == "lint":
                return  # it looks for prompts in it
            file.mkdir()
    says_what_is_wrong(*run(*command, file), str(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_length": None}, "input_length"),
        ({"input_length": 0}, "input_length"),
        ({"input_length": "x"}, "input_length"),
        ({"hash_ids": 3}, "hash_ids"),
        ({"hash_ids": ["a", "b"]}, "hash_ids"),
        ({"hash_ids": [1, 2, 3]}, "3 ids for 600 tokens"),
        ({"timestamp": "x"}, "timestamp"),
        ({"output_length": []}, "output_length"),
        ({"timestamp": ...}, "timestamp"),
        ({"hash_ids": None}, "hash_ids"),
        ({"input_length": ...}, "input_length"),
    ],
)
def test_a_trace_names_the_line_and_what_it_expects(change: dict[str, object], words: str, tmp_path: Path) -> None:
    row = {name: value for name, value in {**ROW, **change}.items() if value is not ...}
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(ROW)}\n\n{json.dumps(row)}\n")
    status, told = run(*TRACE, file)
    says_what_is_wrong(status, told, f"{file}, line 3: ")
    assert words in told and '"input_length": TOKENS' in told


def test_requests_without_ids_are_told_and_a_file_of_them_is_refused(tmp_path: Path) -> None:
    """Else their hit rate would look like a fact."""
    bare = {name: value for name, value in ROW.items() if name != "hash_ids"}
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(ROW)}\n{json.dumps(bare)}\n")
    status, told = run(*TRACE, file)
    assert (status, "1 requests tell no hash_ids" in told) == (0, True)
    file.write_text(f"{json.dumps(bare)}\n")
    status, told = run(*TRACE, file)
    says_what_is_wrong(status, told, f"{file} tells no hash_ids")


@pytest.mark.parametrize("spoil", [lambda raw: raw[:40], lambda raw: b"no" + raw, lambda raw: raw[:20] + b"\xff" * 9])
def test_a_trace_that_is_no_whole_gzip_file_is_told(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(spoil(gzip.compress(f"{json.dumps(ROW)}\n".encode() * 100)))
    says_what_is_wrong(*run(*TRACE, file), str(file))


def test_a_line_without_messages_is_named(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": []}\n\n{"body": {"messages": []}}\n{"body": {}}\n')
    status, told = run(*READERS["bench"], file)
    assert status == 2 and f"{file}, line 4: " in told and '"messages"' in told


def test_a_value_that_is_none_is_told_with_its_line(tmp_path: Path) -> None:
    """A date, or a number of thousands of digits, deep in a file of settings."""
    for value, words in (("2020-13-45", "month"), ("9" * 5000, "digits")):
        file = tmp_path / "settings.yaml"
        file.write_text(f"model: demo\nreplicas: 1\nlora_adapters: {{a: {value}}}\n")
        assert run("check", file)[1].startswith(f"{file}:3: ")
        assert words in run("check", file)[1]
        assert f"{file}:3: " in run(*PREFIXES, "--config", file)[1]
