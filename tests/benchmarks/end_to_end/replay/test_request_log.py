"""Request logs: both line formats and every time format are read, and errors name the line."""

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.common.trace import DEFAULT_TRACE
from benchmarks.end_to_end.replay.request_log import CHAT, COMPLETIONS, LoggedRequest, is_log, read_log

CHAT_BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0.5}
COMPLETION_BODY: dict[str, Any] = {"model": "m", "prompt": "Hello", "max_tokens": 3}
STARTED_S = 1_700_000_000


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def line_of(body: dict[str, Any], timestamp: float | str, *, batch: bool, **more: Any) -> dict[str, Any]:
    if not batch:
        return {**body, "timestamp": timestamp, **more}
    url = CHAT if "messages" in body else COMPLETIONS
    return {"custom_id": "1", "method": "POST", "url": url, "body": body, "timestamp": timestamp, **more}


def iso(at_s: int) -> str:
    return datetime.fromtimestamp(STARTED_S + at_s, UTC).isoformat()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from([CHAT_BODY, COMPLETION_BODY]),
            st.integers(0, 10_000),
            st.booleans(),
            st.sampled_from(["seconds", "milliseconds", "iso"]),
            st.sampled_from(["", "acme"]),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_every_shape_says_the_same(tmp_path: Path, requests: list[tuple[dict[str, Any], int, bool, str, str]]) -> None:
    """Batch lines and bare bodies, with any time format, give the same unchanged bodies in order of their times."""
    forms = {
        "seconds": lambda at_s: STARTED_S + at_s,
        "milliseconds": lambda at_s: (STARTED_S + at_s) * 1000,
        "iso": iso,
    }
    rows = [
        line_of(body, forms[form](at_s), batch=batch, **({"tenant": tenant} if tenant else {}))
        for body, at_s, batch, form, tenant in requests
    ]
    expected = [
        LoggedRequest(STARTED_S + at_s, CHAT if "messages" in body else COMPLETIONS, body, tenant)
        for body, at_s, _, _, tenant in requests
    ]
    path = written(tmp_path / "log.jsonl", rows)
    assert read_log(path) == sorted(expected, key=lambda request: request.at_s)
    packed = tmp_path / "log.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_log(packed) == read_log(path)


def test_a_log_is_told_from_a_trace(tmp_path: Path) -> None:
    assert is_log(written(tmp_path / "log.jsonl", [line_of(CHAT_BODY, 0.0, batch=True)]))
    assert not is_log(DEFAULT_TRACE)
    with pytest.raises(ValueError, match="holds no requests"):
        is_log(written(tmp_path / "empty.jsonl", []))


@pytest.mark.parametrize(
    "wrong",
    [
        CHAT_BODY,
        {**CHAT_BODY, "timestamp": "yesterday"},
        line_of(CHAT_BODY, 1.0, batch=True) | {"url": COMPLETIONS},
        line_of(CHAT_BODY, 1.0, batch=True) | {"method": "GET"},
        line_of(CHAT_BODY, 1.0, batch=True) | {"body": "text"},
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = written(tmp_path / "log.jsonl", [line_of(COMPLETION_BODY, 0.0, batch=False), wrong])
    with pytest.raises(ValueError, match="line 2"):
        read_log(path)
