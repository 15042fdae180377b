"""`warmpath traffic`: made from other files, shown and exported; faults end with 2 and a sentence."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app

LINES = [
    {"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]},
    {"timestamp": 4000, "input_length": 1600, "output_length": 7, "hash_ids": [0, 1, 3, 4]},
]


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["traffic", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_a_trace_is_imported_shown_and_exported(tmp_path: Path, trace: Path) -> None:
    ours, back = tmp_path / "ours.jsonl.gz", tmp_path / "back.jsonl"
    assert run("import", trace, "--to", ours)[0] == 0
    status, said = run("show", ours, "--json")
    summary = json.loads(said[said.index("{") :])
    assert (status, summary["requests"], summary["span_s"], summary["prompt_tokens"]) == (0, 2, 4.0, 2700)
    assert summary["reusable"] == 1024 / 2700
    assert summary["parts"][0]["name"] == "model / default"
    assert "2 requests in 4 s" in run("show", ours)[1]
    status, said = run("export", ours, "--format", "mooncake", "--to", back)
    assert status == 0 and "2 requests, an id for 512 tokens" in said
    assert [json.loads(line) for line in back.read_text().splitlines()] == LINES
    assert run("export", ours, "--format", "mooncake", "--to", back)[0] == 2


def test_finer_ids_are_exported_to_aiperf_as_they_are(tmp_path: Path) -> None:
    ours, out = tmp_path / "ours", tmp_path / "out"
    header = {"warmpath_traffic": 1, "recording": "a", "started_s": 5.0, "block_tokens": 16}
    late = {"timestamp": 20, "input_length": 40, "output_length": 4, "hash_ids": [1, 2]}
    early = {"timestamp": 10, "input_length": 40, "output_length": 0, "hash_ids": [1, 3]}
    gone = {"timestamp": 15, "input_length": 0, "status": 429}
    ours.write_text("".join(json.dumps(line) + "\n" for line in (header, late, early, gone)))
    status, said = run("export", ours, "--format", "aiperf", "--to", out)
    assert status == 0 and "--isl-block-size 16" in said and "1 requests were refused" in said
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["timestamp"] for line in lines] == [0, 10]
    assert [line["hash_ids"] for line in lines] == [[0, 1, 2], [0, 3, 4]]  # a partial block has an id of its own
    assert [line["output_length"] for line in lines] == [1, 4]
    assert run("export", ours, "--format", "mooncake", "--to", tmp_path / "coarse", "--block-tokens", "24")[0] == 2


def test_faults_end_with_a_sentence(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "words").write_text("once upon a time\n")
    status, said = run("import", tmp_path / "words", "--to", tmp_path / "ours")
    assert status == 2 and "no known form begins with" in said
    assert run("show", tmp_path / "words")[0] == 2
    assert run("show", tmp_path / "none")[0] == 2
    assert run("import", trace, "--to", tmp_path / "none" / "ours")[0] == 2
    status, said = run("import", trace, "--to", tmp_path / "ours", "--tokenizer", str(tmp_path / "none"))
    assert status == 2 and "none" in said
