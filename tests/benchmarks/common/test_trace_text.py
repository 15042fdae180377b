"""The replay: texts share tokens as the ids do, requests are sent at their times, and figures count the results."""

import asyncio
import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.common.prompts import tokenizer_of
from benchmarks.common.trace import DEFAULT_TRACE
from benchmarks.end_to_end.replay.request_log import CHAT, COMPLETIONS, LoggedRequest, is_log, read_log
from benchmarks.end_to_end.replay.run import run, with_tenants
from benchmarks.end_to_end.replay.shots import read_keys, shots_of
from benchmarks.end_to_end.replay.text import TraceText
from serve_app.checkpoints.reuse import TraceRequest
from serve_app.checkpoints.sources import resolve_model
from serve_app.replay.client import TimedAnswer
from serve_app.replay.open_loop import Result, Shot, fire, summary

IDS = st.lists(st.integers(0, 1 << 30), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model("demo")


def tokens_of(model: Path, text: str) -> np.ndarray:  # type: ignore[type-arg]
    return tokenizer_of(model).encode(text, b"\0" * 16).token_ids


def common(one: np.ndarray, other: np.ndarray) -> int:  # type: ignore[type-arg]
    shortest = min(len(one), len(other))
    differs = np.flatnonzero(one[:shortest] != other[:shortest])
    return int(differs[0]) if len(differs) else shortest


@settings(max_examples=60)
@given(IDS, IDS, st.sampled_from([16, 64]), st.integers(0, 511))
def test_prompts_share_tokens_exactly_as_far_as_ids_are_equal(
    model: Path, one: list[int], other: list[int], tokens_per_id: int, short: int
) -> None:
    """Equal ids give equal tokens; the first different id differs within its first few tokens."""
    text = TraceText(model, tokens_per_id)
    requests = [TraceRequest(0.0, 512 * len(ids) - short, 8, tuple(ids)) for ids in (one, other)]
    found = [tokens_of(model, text.prompt(request)) for request in requests]
    for request, tokens in zip(requests, found, strict=True):
        assert len(tokens) == text.prompt_tokens(request)
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    shared = common(*found)
    whole = min(same * tokens_per_id, len(found[0]), len(found[1]))
    assert whole <= shared < whole + 16


def test_the_published_trace_is_dealt_to_all_tenants(model: Path) -> None:
    """All its prompts share one first block; the blocks after it distinguish conversations."""
    options = run.parse(["--requests", "40", "--tokens-per-id", "8"])
    dealt = [shot.tenant for shot in shots_of(options, {"a": "ka", "b": "kb"})]
    assert len(dealt) == 40 and set(dealt) == {"a", "b"}


def test_generated_tenants_ask_with_their_own_keys(model: Path) -> None:
    """A tenant without a key uses the common one; bodies fit the ids."""
    flags = ["--trace", "tenants", "--tenants", "3", "--seconds", "300", "--tokens-per-id", "8"]
    options = run.parse([*flags, "--speed", "2", "--requests", "60"])
    shots = shots_of(options, {"": "other", "m-small-38": "own"})
    assert len(shots) == 60
    assert {shot.tenant: shot.api_key for shot in shots} == {
        "m-small-5": "other",
        "m-small-38": "own",
        "m-small-17": "other",
    }
    configured, settings_flags = with_tenants(shots)
    assert len({shot.api_key for shot in configured}) == 3
    assert all(name in settings_flags[0] for name in ("m-small-5", "m-small-38", "m-small-17"))
    assert not any(shot.api_key in settings_flags[0] for shot in configured)
    with pytest.raises(ValueError, match="no requests in that part"):
        shots_of(run.parse([*flags, "--skip", "100000"]), {})


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that begins with $ names an environment variable; an unset variable is an error."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-all")
    monkeypatch.setenv("ACME_KEY", "sk-acme")
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"acme": "$ACME_KEY", "globex": "sk-g"}))
    flags = ["--url", "http://x", "--api-keys", str(file)]
    assert read_keys(run.parse(flags)) == {"": "sk-all", "acme": "sk-acme", "globex": "sk-g"}
    monkeypatch.delenv("ACME_KEY")
    with pytest.raises(ValueError, match=r"acme is \$ACME_KEY"):
        read_keys(run.parse(flags))


def test_figures_count_answers_refusals_and_failures_apart() -> None:
    """TTFT includes time lost in the client; refused and failed requests have no TTFT."""
    shot = Shot(1.0, "/v1/completions", {})
    quick = TimedAnswer(0.1, 1.1, "x", 100, 80, 11)
    slow = TimedAnswer(2.0, 3.0, "x", 100, 0, 1)
    results = [Result(shot, 0.1, quick), Result(shot, 0.0, slow)]
    results += [Result(shot, 0.0, None, 429, "busy"), Result(shot, 0.0, None, 500, "bad"), Result(shot, 0.0, None, 0)]
    row = summary(results, ttft_slo_s=1.0)
    assert (row["answered"], row["rejected"], row["failed"]) == (2, 1, 2)
    assert row["hit_rate"] == pytest.approx(0.4)
    assert row["ttft_mean_s"] == pytest.approx(1.1)
    assert row["tpot_mean_s"] == pytest.approx(0.1)
    assert row["goodput_rps"] == pytest.approx(1 / 3.0)
    assert "ttft_mean_s" not in summary(results[2:], 1.0)


def test_a_server_that_is_not_there_is_a_failure_of_each_request() -> None:
    """Nothing raises: every shot has its result, in order."""
    shots = [Shot(0.0, "/v1/completions", {"prompt": str(i)}) for i in range(3)]
    done: list[None] = []
    results = asyncio.run(fire("http://127.0.0.1:9", shots, 5.0, lambda: done.append(None)))
    assert [result.shot for result in results] == shots
    assert all(result.status == 0 and "Connect" in result.reason for result in results)
    assert len(done) == 3


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
