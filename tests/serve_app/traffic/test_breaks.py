"""Where recorded prompts leave earlier ones, by model and tenant, is what a walk over their ids finds."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from serve_app.cli.main import app
from serve_app.traffic.breaks import is_recording, prompt_breaks
from serve_app.traffic.reader import read_traffic
from serve_app.traffic.workload import shared_tokens
from tests.serve_app.traffic.test_reader import HEADER, line, prompts, written


@given(chains=prompts(), data=st.data())
def test_known_tokens_and_breaks_are_those_of_a_walk(
    tmp_path_factory: pytest.TempPathFactory, chains: list[list[int]], data: st.DataObject
) -> None:
    """A prompt is known as far as any earlier one had the same ids."""
    tenants = [data.draw(st.sampled_from("ab")) for _ in chains]
    lines = [line(n, 16 * len(chain) + 3, chain, tenant=tenants[n]) for n, chain in enumerate(chains)]
    workload = read_traffic([written(tmp_path_factory.mktemp("law") / "a.jsonl", HEADER, *lines)])
    seen: set[int] = set()
    known, places = [], dict[tuple[str, int], list[int]]()
    for chain, tenant in zip(chains, tenants, strict=True):
        known.append(16 * sum(each in seen for each in chain))
        seen.update(chain)
        places.setdefault((tenant, known[-1]), []).append(16 * len(chain) + 3 - known[-1])
    shared = shared_tokens(workload.paths, workload.path_start, workload.sizes, workload.block_tokens)
    assert shared.tolist() == known
    told = {(one.tenant, one.tokens): (one.prompts, one.lost_tokens) for one in prompt_breaks(workload)}
    assert told == {place: (len(lost), sum(lost)) for place, lost in places.items() if len(lost) > 1}


def test_lint_tells_where_recorded_prompts_leave_earlier_ones(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", HEADER, *(line(n, 64, [1, 2, 10 + n, 20 + n], tenant="t") for n in range(3)))
    told = CliRunner().invoke(app, ["prompts", "lint", str(path)])
    assert told.exit_code == 0, told.output
    assert (
        "model, tenant t: 2 prompts leave all earlier ones after 32 tokens; 64 tokens behind it are new." in told.output
    )
    assert "3 prompts, 33.3% of 192 tokens seen before." in told.output
    shown = json.loads(CliRunner().invoke(app, ["prompts", "lint", str(path), "--format", "json"]).stdout)
    assert (shown["known_tokens"], shown["breaks"][0]["prompts"]) == (64, 2)


def test_lint_takes_no_text_beside_a_recording_and_tells_of_a_bad_one(tmp_path: Path) -> None:
    path, text = written(tmp_path / "a.jsonl", HEADER, line(0, 64, [1])), tmp_path / "prompt.txt"
    text.write_text("You are helpful.")
    both = CliRunner().invoke(app, ["prompts", "lint", str(path), str(text)])
    assert both.exit_code == 2 and "recorded traffic, which has no text" in both.output
    bad = CliRunner().invoke(app, ["prompts", "lint", str(path)])
    assert bad.exit_code == 2 and "1 ids for 64 tokens" in bad.output


def test_other_files_are_no_recordings(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    assert not any(map(is_recording, [empty, tmp_path, tmp_path / "none", written(tmp_path / "x", {"messages": []})]))
