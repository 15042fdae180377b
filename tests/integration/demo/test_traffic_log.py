"""Recorded traffic of two ingresses in Ray: one key, two files, and no word of anybody's."""

import json
from pathlib import Path
from typing import Any

from tests.harness.eventually import eventually
from tests.integration.demo.conftest import INGRESSES, KEYS, Served

QUESTION = ("user", "Which berth has the deepest water at the lowest tide? " * 10)


def files_of(served: Served) -> list[Path]:
    return sorted(served.root.glob("traffic.*.jsonl"))


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines: the last one may be under way."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_two_ingresses_record_with_one_key(served: Served) -> None:
    """Each has answered a prompt, and both tell the same ids for it; a header names each model's pool."""

    def both_have_it() -> bool:
        served.chat("acme", QUESTION)
        held = [{tuple(line.get("hash_ids", ())) for line in lines_of(path)} for path in files_of(served)]
        return len(held) == INGRESSES and any(len(ids) > 5 for ids in held[0] & held[1])

    eventually(both_have_it, every_s=0.1)
    headers = [lines_of(path)[0] for path in files_of(served)]
    assert len({header["recording"] for header in headers}) == 1
    assert len({header["writer"] for header in headers}) == INGRESSES
    for header in headers:
        facts = header["models"]["demo"]
        assert facts["engine"] == "torch" and facts["replicas"] == 2 and facts["pool_tokens"] > 0
    replicas = {one for path in files_of(served) for line in lines_of(path) for one in line.get("replicas", ())}
    answered = [line for path in files_of(served) for line in lines_of(path) if line.get("ttft_ms")]
    # Other tests of this folder have killed some meanwhile.
    assert answered and {line["replica"] for line in answered} <= replicas and len(replicas) >= 2


def test_no_file_has_a_name_a_word_or_a_key(served: Served) -> None:
    """Of all that the tests of this folder sent until now."""
    written = "".join(path.read_text() for path in files_of(served))
    told = [word for word in ("berth", *KEYS, *(key for pair in KEYS.values() for key in pair)) if word in written]
    assert told == []
