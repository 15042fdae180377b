"""Traces with ids keep exactly the prefixes that they tell, under ids that no other import has."""

import gzip
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.request_files import TraceError
from serve_app.traffic.export import mooncake_lines
from serve_app.traffic.forms import SourceForm
from serve_app.traffic.importers.run import form_of, import_traffic
from serve_app.traffic.importers.source import ImportOptions
from serve_app.traffic.importers.with_ids import TraceLines
from serve_app.traffic.reader import read_traffic

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]},
    {"timestamp": 1000, "input_length": 1600, "output_length": 7, "hash_ids": [0, 1, 3, 4]},
    {"timestamp": 3000, "input_length": 512, "output_length": 1, "hash_ids": [0]},
    {"timestamp": 3000, "input_length": 1100, "output_length": 2, "hash_ids": [0, 1, 2]},
]


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def imported(path: Path, target: Path, form: SourceForm = SourceForm.auto, **options: float) -> list[dict[str, object]]:
    """Return the lines of an import, its header first."""
    import_traffic([path], form, target, ImportOptions(**options))  # type: ignore[arg-type]
    return [json.loads(line) for line in target.read_text().splitlines()]


def ids_of(lines: list[dict[str, object]]) -> list[list[int]]:
    return [line.get("hash_ids", []) for line in lines[1:]]  # type: ignore[misc]


def test_mooncake_comes_back_as_it_was(tmp_path: Path) -> None:
    source = written(tmp_path / "trace.jsonl", *MOONCAKE)
    assert form_of(source) is SourceForm.mooncake
    target = tmp_path / "ours.jsonl.gz"
    assert import_traffic([source], SourceForm.auto, target, ImportOptions()) == 4
    assert json.loads(gzip.decompress(target.read_bytes()).splitlines()[0])["source"] == "mooncake"
    back = mooncake_lines([target], None, ImportOptions().notes)
    assert [msgspec.to_builtins(line) for line in back] == MOONCAKE


def test_two_imports_share_no_id(tmp_path: Path) -> None:
    source = written(tmp_path / "trace.jsonl", *MOONCAKE)
    one, other = (imported(source, tmp_path / name) for name in ("one", "other"))
    sets = [{each for ids in ids_of(lines) for each in ids} for lines in (one, other)]
    assert len(sets[0]) == 5 and not sets[0] & sets[1]
    assert one[0]["recording"] != other[0]["recording"]
    assert not {*range(5)} & sets[0]


def test_ids_of_two_files_mean_different_prompts(tmp_path: Path) -> None:
    files = [written(tmp_path / name, *MOONCAKE) for name in ("a", "b")]
    target = tmp_path / "both"
    import_traffic(files, SourceForm.auto, target, ImportOptions())
    lines = [json.loads(line) for line in target.read_text().splitlines()[1:]]
    assert not {*lines[0]["hash_ids"]} & {*lines[4]["hash_ids"]}


def test_lacking_ids_are_shared_with_none(tmp_path: Path) -> None:
    source = written(tmp_path / "trace", {"timestamp": 0, "input_length": 1100}, {"timestamp": 1, "input_length": 1100})
    options = ImportOptions(output_tokens=5)
    import_traffic([source], SourceForm.auto, tmp_path / "ours", options)
    workload = read_traffic([tmp_path / "ours"])
    assert workload.output_tokens.tolist() == [5, 5]
    assert workload.sizes.tolist() == [2, 2]
    assert any("fewer hash_ids" in note for note in options.notes)


def test_coarser_blocks_are_the_last_of_each_group(tmp_path: Path) -> None:
    source = written(tmp_path / "trace", *MOONCAKE)
    import_traffic([source], SourceForm.mooncake, tmp_path / "ours", ImportOptions(), 1024)
    lines = [json.loads(line) for line in (tmp_path / "ours").read_text().splitlines()]
    assert lines[0]["block_tokens"] == 1024
    assert [len(line.get("hash_ids", ())) for line in lines[1:]] == [1, 2, 0, 1]
    with pytest.raises(TraceError, match="700 is no multiple"):
        import_traffic([source], SourceForm.mooncake, tmp_path / "other", ImportOptions(), 700)


def test_turns_of_aiperf_stand_behind_all_before_them(tmp_path: Path) -> None:
    turns = [
        {"session_id": "s", "timestamp": 0, "input_length": 1024, "output_length": 100, "hash_ids": [1, 2]},
        {"session_id": "s", "delay": 2000, "input_length": 924, "output_length": 10, "hash_ids": [8, 9]},
        {"session_id": "t", "timestamp": 9000, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]},
    ]
    source = written(tmp_path / "turns.jsonl", *turns)
    assert form_of(source) is SourceForm.aiperf
    lines = imported(source, tmp_path / "ours")
    first, second, other = lines[1:]
    assert [line["input_length"] for line in lines[1:]] == [1024, 2048, 1024]
    assert second["timestamp"] == 2000.0 and second["parent"] == first["id"] and second["session"] == first["session"]
    chains = ids_of(lines)
    assert chains[1][:2] == chains[0] == chains[2] and len(chains[1]) == 4
    assert other["session"] not in ("t", first["session"]) and "parent" not in other


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=5))
def test_a_session_has_a_hash_for_every_whole_block(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[int, int]]
) -> None:
    rows = [
        {"session_id": 1, "timestamp": n, "input_length": tokens * 100, "output_length": out * 50, "hash_ids": [n] * 8}
        for n, (tokens, out) in enumerate(turns)
    ]
    source = written(tmp_path_factory.mktemp("session") / "trace", *rows)
    before, total = b"", 0
    for request, (tokens, out) in zip(TraceLines(source, ImportOptions()).requests(), turns, strict=True):
        total += tokens * 100
        assert request.tokens == total and len(request.hashes) // 16 == total // 512
        assert request.hashes.startswith(before)
        before, total = request.hashes, total + out * 50


WEKA = {
    "id": "trace_1",
    "models": ["claude"],
    "block_size": 64,
    "tool_tokens": 10,
    "system_tokens": 3,
    "requests": [
        {"t": 0.0, "type": "s", "model": "opus", "in": 130, "out": 7, "hash_ids": [1, 2, 3], "stop": "", "ttft": 0.5},
        {"t": 2.5, "type": "subagent", "agent_id": "x", "requests": [
            {"t": 3.0, "type": "n", "model": "haiku", "in": 64, "out": 3, "hash_ids": [1]}]},
        {"t": 9.0, "type": "n", "model": "opus", "in": 192, "out": 7, "hash_ids": [1, 2, 4]},
    ],
}  # fmt: skip


@pytest.mark.parametrize("indent", [None, 2])
def test_agents_sessions_are_read_whole_or_by_line(tmp_path: Path, indent: int | None) -> None:
    source = tmp_path / "trace_1.json"
    source.write_text(json.dumps(WEKA, indent=indent))
    assert form_of(source) is SourceForm.weka
    lines = imported(source, tmp_path / "ours")
    assert lines[0]["block_tokens"] == 64
    first, inner, last = lines[1:]
    chains = ids_of(lines)
    assert chains[0][:2] == chains[2][:2] and chains[0][:1] == chains[1]
    assert (first["ttft_ms"], inner["model"], last["timestamp"]) == (500.0, "haiku", 9000.0)
    assert last["parent"] == first["id"] and inner["session"] != first["session"]


def test_each_session_has_its_own_ids_and_beginning(tmp_path: Path) -> None:
    source = written(tmp_path / "traces.jsonl", WEKA, WEKA, {**WEKA, "hash_id_scope": "global"})
    lines = imported(source, tmp_path / "ours", rate=0.1)
    assert [lines[at]["timestamp"] for at in (1, 4, 7)] == [0.0, 10000.0, 20000.0]
    assert len({tuple(ids_of(lines)[at]) for at in (0, 3, 6)}) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("once upon a time\n", "begins with 'once upon a time'"),
        ('{"warmpath_traffic": 1}\n', "recorded traffic already"),
        ('{"messages": [{"role": "user", "content": ""}]}\n', "has no time"),
        ('{"timestamp": 0, "input_length": -4, "hash_ids": []}\n{}\n', "line 1: input_length"),
        ('{"timestamp": 0, "input_length": "x", "hash_ids": []}\n{}\n', "line 1: Expected"),
        ('{"requests": [], "block_size": 0}', "block_size is 0"),
        ('{"timestamp": 0, "input_length": 4, "hash', "no known form begins"),
    ],
)
def test_other_files_are_refused_with_a_remedy(tmp_path: Path, text: str, said: str) -> None:
    source = tmp_path / "some.jsonl"
    source.write_text(text)
    with pytest.raises(TraceError, match=said) as caught:
        import_traffic([source], SourceForm.auto, tmp_path / "ours", ImportOptions())
    assert "some.jsonl" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["some.jsonl"]  # nothing half done is left


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source, target = written(tmp_path / "trace", *MOONCAKE), written(tmp_path / "ours", {})
    with pytest.raises(TraceError, match="exists"):
        import_traffic([source], SourceForm.auto, target, ImportOptions())
    assert target.read_text() == "{}\n"
