"""The page of the form is current, and its example is a file that can be read."""

from pathlib import Path

import msgspec

from serve_app.traffic.reader import read_traffic
from serve_app.traffic.reference import EXAMPLE, traffic_page
from tests.pages import DOCS


def test_the_page_of_recorded_traffic_is_current() -> None:
    """`make docs` generates it, with every field."""
    assert (DOCS / "reference" / "traffic.md").read_text() == traffic_page()


def test_its_example_is_recorded_traffic(tmp_path: Path) -> None:
    path = tmp_path / "example.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in EXAMPLE))
    workload = read_traffic([path])
    assert (workload.prompt_tokens.tolist(), workload.sizes.tolist(), workload.block_tokens) == ([37], [2], 16)
    assert [len(change.replicas) for change in workload.changes] == [2]
