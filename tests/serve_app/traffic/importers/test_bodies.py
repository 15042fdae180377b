"""Bodies and logs become what a server would have recorded of them, without their text."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from serve_app.request_files import TraceError
from serve_app.tokenization.tokenizer import PromptTokenizer
from serve_app.traffic.forms import SourceForm
from serve_app.traffic.importers.bodies import address_of
from serve_app.traffic.importers.prompts import ServerPrompts
from serve_app.traffic.importers.run import form_of, import_traffic
from serve_app.traffic.importers.source import ImportOptions, seconds
from serve_app.traffic.importers.vllm_log import VllmLog

SYSTEM = {"role": "system", "content": "You are the clerk of a large library and you answer in whole sentences. " * 4}
HELLO = [SYSTEM, {"role": "user", "content": "Hello there"}]
MORE = [*HELLO, {"role": "assistant", "content": "Good day."}, {"role": "user", "content": "Where are the maps?"}]


@pytest.fixture(scope="module")
def reader(demo_model_path: Path) -> ServerPrompts:
    return ServerPrompts(demo_model_path)


def imported(
    source: Path, reader: ServerPrompts | None, *lines: object, form: SourceForm = SourceForm.auto
) -> tuple[list[dict[str, object]], ImportOptions]:
    """Return the lines of an import, its header first, and its options with their notes."""
    source.write_text("".join(json.dumps(each) + "\n" for each in lines))
    options, target = ImportOptions(reader=reader, rate=2.0, output_tokens=3), source.with_suffix(".ours")
    import_traffic([source], form, target, options)
    return [json.loads(line) for line in target.read_text().splitlines()], options


def test_a_log_of_openai_is_counted_as_the_server_counts(
    tmp_path: Path, reader: ServerPrompts, tokenizer: PromptTokenizer
) -> None:
    usage = {"response": {"body": {"usage": {"completion_tokens": 12}}}}
    lines, options = imported(
        tmp_path / "log.jsonl",
        reader,
        {"timestamp": "2026-11-01T10:00:00Z", "tenant": "acme", "body": {"model": "m", "messages": HELLO}, **usage},
        {"timestamp": "2026-11-01T10:00:05+00:00", "tenant": "acme", "body": {"model": "m", "messages": MORE}},
        {"timestamp": 1793527206500, "tenant": "zeta", "model": "m", "messages": HELLO, "max_tokens": 40, "n": 2},
        {"timestamp": 1793527207, "model": "m", "prompt": ["Once upon a time", "Twice"]},
        {"timestamp": 1793527208, "model": "m", "input": "Where?", "instructions": "Be brief"},
        {"timestamp": 1793527209, "model": "m", "messages": []},
    )
    rows = lines[1:]
    rendered = tokenizer.template.render(HELLO, (), add_generation_prompt=True).text
    assert rows[0]["input_length"] == len(tokenizer.encode(rendered, bytes(16)).token_ids)
    assert lines[0]["block_tokens"] == 16 and lines[0]["started_s"] == 1793527200.0
    assert [row["timestamp"] for row in rows] == [0.0, 5000.0, 6500.0, 7000.0, 7000.0, 8000.0]
    assert [row["output_length"] for row in rows] == [12, 3, 80, 16, 16, 3]
    hello, more, other = (row["hash_ids"] for row in rows[:3])
    assert isinstance(hello, list) and isinstance(more, list) and isinstance(other, list)
    assert hello[:4] == more[:4] and len(hello) == len(other) and not {*hello} & {*other}  # a tenant has its own
    assert rows[0]["tenant"] == rows[1]["tenant"] not in ("acme", rows[2]["tenant"])
    assert "acme" not in json.dumps(lines) and "library" not in json.dumps(lines)
    assert [count for note, count in options.notes.items() if "line 6" in note] == [1]


def test_batches_arrive_by_the_rate(tmp_path: Path, reader: ServerPrompts) -> None:
    lines, options = imported(
        tmp_path / "batch.jsonl",
        reader,
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": HELLO}},
        {"custom_id": "b", "params": {"model": "m", "max_tokens": 9, "messages": HELLO[1:], "system": "Be kind"}},
    )
    assert [line["timestamp"] for line in lines[1:]] == [0.0, 500.0]
    assert lines[2]["output_length"] == 9
    assert any("no times" in note for note in options.notes)


def test_text_needs_its_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="--tokenizer MODEL"):
        imported(tmp_path / "log.jsonl", None, {"timestamp": 0, "model": "m", "prompt": "x"})


def test_a_file_without_one_readable_request_is_refused(tmp_path: Path, reader: ServerPrompts) -> None:
    with pytest.raises(TraceError, match="no line is a request that can be read: line 1: "):
        imported(tmp_path / "log.jsonl", reader, {"timestamp": 0, "model": "m", "messages": []})
    with pytest.raises(TraceError, match="line 1: it has no time"):
        imported(tmp_path / "other.jsonl", reader, {"model": "m", "messages": HELLO}, form=SourceForm.openai)


@pytest.mark.parametrize(
    ("line", "api", "path"),
    [
        ({"url": "https://host/v1/messages?beta=true", "messages": []}, "", "/v1/messages"),
        ({"messages": [], "model": "claude-opus"}, "", "/v1/messages"),
        ({"messages": [], "model": "claude-opus"}, "openai", "/v1/chat/completions"),
        ({"messages": [], "model": "x"}, "anthropic", "/v1/messages"),
        ({"messages": [], "model": "x"}, "", "/v1/chat/completions"),
        ({"prompt": ""}, "", "/v1/completions"),
        ({"input": ""}, "", "/v1/responses"),
    ],
)
def test_bodies_go_to_their_api(line: dict[str, object], api: str, path: str) -> None:
    assert address_of(line, line, api) == path


def test_times_are_seconds_milliseconds_or_words() -> None:
    assert seconds("2026-11-01T10:00:00Z") == seconds(1793527200) == seconds(1793527200000) == seconds("1793527200")
    assert seconds("2026-11-01T10:00:00") == 1793527200.0
    for wrong in (None, True, [], "noon"):
        with pytest.raises(ValueError):
            seconds(wrong)


PARAMS = "SamplingParams(n=1, presence_penalty=0.0, max_tokens=25, structured_outputs=None)"
OLD = (
    "INFO 11-30 08:36:11 [logger.py:43] Received request cmpl-1-0: prompt: 'It\\'s \"so\"\\n', params: "
    + PARAMS
    + ", prompt_token_ids: {ids}, prompt_embeds shape: None, lora_request: {lora}.\n"
)
NEW = (
    "(APIServer pid=7) DEBUG 11-30 08:36:12 [logger.py:51] Request chatcmpl-2 details: prompt: '<|im_start|>Hello', "
    "prompt_token_ids: None, prompt_embeds shape: None.\n"
    "(APIServer pid=7) INFO 11-30 08:36:13 [logger.py:39] Received request chatcmpl-2: params: "
    + PARAMS
    + ", lora_request: None.\n"
)


def test_vllms_log_is_read_in_both_forms(tmp_path: Path, reader: ServerPrompts) -> None:
    log = tmp_path / "vllm.log"
    adapter = "LoRARequest(lora_name='sql', lora_int_id=1)"
    log.write_text(
        "INFO 11-30 08:36:10 [api_server.py:1] Started\n"
        + OLD.format(ids=[*range(40)], lora=adapter)
        + OLD.format(ids=None, lora=None)
        + NEW
    )
    assert form_of(log) is SourceForm.vllm
    requests = [*VllmLog(log, ImportOptions(reader=reader), datetime(2027, 1, 3, tzinfo=UTC)).requests()]
    assert [datetime.fromtimestamp(one.at_s, UTC).isoformat() for one in requests] == [
        "2026-11-30T08:36:11+00:00", "2026-11-30T08:36:11+00:00", "2026-11-30T08:36:13+00:00"
    ]  # fmt: skip
    assert [one.adapter for one in requests] == ["sql", "", ""]
    assert (requests[0].tokens, len(requests[0].hashes), requests[0].output_tokens) == (40, 32, 25)
    assert requests[1].tokens == reader.prompt('It\'s "so"\n', "", "", "", special=True)[0]


def test_a_log_without_prompts_names_what_is_missing(tmp_path: Path, reader: ServerPrompts) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(NEW.splitlines(keepends=True)[1])
    with pytest.raises(TraceError, match=r"1 requests are logged without their prompts.*VLLM_LOGGING_LEVEL=DEBUG"):
        import_traffic([log], SourceForm.auto, tmp_path / "ours", ImportOptions(reader=reader))
