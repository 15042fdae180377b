"""Recorded traffic is read exactly: prefixes as in the file, files in one order, and faults told in a sentence."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.request_files import TraceError
from serve_app.traffic.reader import read_traffic
from serve_app.traffic.workload import Workload, chained, segments

HEADER = {"warmpath_traffic": 1, "recording": "a", "started_s": 100.0, "block_tokens": 16}


def line(at_ms: float, tokens: int, ids: list[int], **more: object) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": 4, "hash_ids": ids, **more}


def written(path: Path, *lines: object, end: str = "\n") -> Path:
    path.write_text("\n".join(json.dumps(each) for each in lines) + end)
    return path


def common(workload: Workload, one: int, other: int) -> int:
    """Return the blocks that two prompts share, by their segments."""
    paths = [workload.paths[workload.path_start[n] : workload.path_start[n + 1]].tolist() for n in (one, other)]
    blocks = 0
    for left, right in zip(*paths, strict=False):
        if left != right:
            break
        blocks += int(workload.sizes[left])
    return blocks


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    """Return prompts as chains of ids that stand for whole beginnings."""
    chains: list[list[int]] = [[]]
    fresh = 0
    for _ in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from(chains))
        kept = base[: draw(st.integers(0, len(base)))]
        more = draw(st.integers(0, 4))
        chains.append([*kept, *range(fresh, fresh + more)])
        fresh += more
    return chains[1:]


@given(prompts())
def test_segments_share_what_ids_share(chains: list[list[int]]) -> None:
    ids = np.array([each for chain in chains for each in chain], np.uint64)
    starts = np.concatenate(([0], np.cumsum([len(chain) for chain in chains]))).astype(np.int64)
    paths, path_start, sizes = segments(ids, starts)
    ways = [paths[path_start[n] : path_start[n + 1]].tolist() for n in range(len(chains))]
    assert [sum(int(sizes[segment]) for segment in way) for way in ways] == [len(chain) for chain in chains]
    for one, chain in enumerate(chains):
        for other, second in enumerate(chains):
            same = next((n for n, (a, b) in enumerate(zip(chain, second, strict=False)) if a != b), None)
            expected = min(len(chain), len(second)) if same is None else same
            blocks = 0
            for left, right in zip(ways[one], ways[other], strict=False):
                if left != right:
                    break
                blocks += int(sizes[left])
            assert blocks == expected


def test_files_of_one_recording_share_prefixes_and_one_order(tmp_path: Path) -> None:
    first = written(tmp_path / "a.jsonl", {**HEADER, "writer": "x"}, line(5000, 40, [1, 2], tenant="t"))
    second = written(tmp_path / "b.jsonl", {**HEADER, "writer": "y", "started_s": 103.0}, line(1000, 40, [1, 3]))
    workload = read_traffic([first, second])
    assert workload.arrival_s.tolist() == [0.0, 1.0]
    assert (workload.started_s, common(workload, 0, 1)) == (104.0, 1)
    assert [workload.tenants[place] for place in workload.tenant] == ["default", "t"]


def test_files_of_two_recordings_share_nothing(tmp_path: Path) -> None:
    first = written(tmp_path / "a.jsonl", HEADER, line(0, 40, [1, 2], tenant="t"))
    second = written(tmp_path / "b.jsonl", {**HEADER, "recording": "b"}, line(1, 40, [1, 2], tenant="t"))
    workload = read_traffic([first, second])
    assert common(workload, 0, 1) == 0
    assert len(workload.tenants) == 2
    assert any("2 recordings" in warning for warning in workload.warnings)


def test_mooncakes_lines_need_no_header(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [7, 8]}\n'))
    workload = read_traffic([path])
    assert (workload.block_tokens, workload.sizes.tolist()) == (512, [1])  # a partial block is never reused


def test_a_cut_last_line_is_left_out_and_told(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", HEADER, line(0, 40, [1, 2]))
    with path.open("a") as file:
        file.write('{"timestamp": 5, "input_le')
    workload = read_traffic([path])
    assert len(workload) == 1
    assert "the last line, 3, is cut off" in workload.warnings[0]


def test_late_lines_are_sorted_and_told(tmp_path: Path) -> None:
    workload = read_traffic([written(tmp_path / "a", HEADER, line(9, 40, [1, 2]), line(2, 40, [3, 4]))])
    assert workload.arrival_s.tolist() == [0.0, pytest.approx(0.007)]
    assert "1 requests stand behind later ones" in workload.warnings[0]


def test_coarser_blocks_keep_what_is_common(tmp_path: Path) -> None:
    path = written(tmp_path / "a", HEADER, line(0, 100, [1, 2, 3, 4, 5, 6]), line(1, 100, [1, 2, 3, 9, 10, 11]))
    workload = read_traffic([path], block_tokens=32)
    assert (workload.block_tokens, common(workload, 0, 1)) == (32, 1)


def test_refused_requests_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "a", HEADER, line(0, 40, [1, 2]), line(1, 0, [], status=429, end="requests"))
    assert (len(read_traffic([path])), read_traffic([path]).refused) == (1, 1)


def test_ids_of_single_blocks_are_taken_with_what_stands_before_them(tmp_path: Path) -> None:
    chains = [[1, 2, 1], [2, 1, 1], [1, 2, 3], [1, 2, 1]]
    workload = read_traffic([written(tmp_path / "a", HEADER, *(line(n, 48, ids) for n, ids in enumerate(chains)))])
    assert "behind different ids" in workload.warnings[0]
    shared = [common(workload, one, other) for one in range(4) for other in range(one)]
    assert shared == [0, 2, 0, 3, 0, 2]


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=8))
def test_chained_ids_are_equal_where_whole_beginnings_are(chains: list[list[int]]) -> None:
    ids = np.array([each for chain in chains for each in chain], np.uint64)
    starts = np.concatenate(([0], np.cumsum([len(chain) for chain in chains]))).astype(np.int64)
    made = iter(chained(ids, starts).tolist())
    pairs = {(next(made), tuple(chain[: at + 1])) for chain in chains for at in range(len(chain))}
    assert len({one for one, _ in pairs}) == len({beginning for _, beginning in pairs}) == len(pairs)


@pytest.mark.parametrize(
    ("lines", "block_tokens", "said"),
    [
        ([{**HEADER, "warmpath_traffic": 2}, line(0, 40, [1, 2])], None, "version 2 of the form"),
        ([HEADER, line(0, 40, [1, 2]), {**HEADER, "block_tokens": 32}, line(0, 40, [1])], None, "follow those of 16"),
        ([HEADER, line(0, 40, [1, 2, 3, 4])], None, "4 ids for 40 tokens in blocks of 16"),
        ([HEADER, {"timestamp": 1}, line(0, 40, [1, 2])], None, "input_length"),
        ([HEADER, line(0, 40, [1, 2])], 24, "24 is no multiple"),
        ([HEADER], None, "holds no answered requests"),
    ],
)
def test_faults_are_told_with_a_remedy(
    tmp_path: Path, lines: list[object], block_tokens: int | None, said: str
) -> None:
    path = written(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(TraceError) as caught:
        read_traffic([path], block_tokens=block_tokens)
    assert said in str(caught.value)
    assert "bad.jsonl" in str(caught.value)


@given(chains=prompts(), data=st.data())
def test_a_file_in_any_order_is_read_as_in_the_order_of_time(
    tmp_path_factory: pytest.TempPathFactory, chains: list[list[int]], data: st.DataObject
) -> None:
    """Also in many small parts, as a large file is."""
    lines = [line(n, 16 * len(chain), chain) for n, chain in enumerate(chains)]
    folder = tmp_path_factory.mktemp("law")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve_app.traffic.reader._REQUESTS", 2)
        mixed = read_traffic([written(folder / "a", HEADER, *data.draw(st.permutations(lines)))])
    sorted_one = read_traffic([written(folder / "b", HEADER, *lines)])
    for name in ("arrival_s", "prompt_tokens", "paths", "path_start", "sizes"):
        assert getattr(mixed, name).tolist() == getattr(sorted_one, name).tolist()
