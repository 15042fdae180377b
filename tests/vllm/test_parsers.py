"""vLLM's parsers by name, over given text: no engine starts."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tokenizers import AddedToken, Tokenizer
from vllm.parser.parser_manager import ParserManager

from serve_app.api.format import Choice, are_whole
from serve_app.api.openai.request import parse_chat
from serve_app.engine.protocol import FinishReason
from serve_app.engine.vllm import parsers
from serve_app.generation.tool_calls.call_reader import WholeChoice
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.generation.tool_calls.round_trip import find_parser
from serve_app.generation.tool_calls.vllm_reader import check_parser
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.generation.outputs import output
from tests.serve_app.ingress.scripted import GENERATION
from tests.serve_app.tokenization.variants import variant_of
from tests.serve_app.tool_templates.families import SEARCH, WEATHER, family

CALLS = {
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=search>\n</function>\n</tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call><tool_call>search\n</tool_call>",
    "pythonic": '[get_weather(city="Oslo", days=2), search()]',
    "hermes": '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}</tool_call>'
    '<tool_call>{"name": "search", "arguments": {}}</tool_call>',
}
"""Two calls in the format of each parser's models; the last parser is ours."""
WORDS = ("<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


@pytest.fixture(scope="module")
def tokenizer(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    def add(tokenizer: Tokenizer) -> None:
        tokenizer.add_tokens([AddedToken(word) for word in WORDS])

    root = tmp_path_factory.mktemp("parsers")
    return PromptTokenizer(variant_of(family("hermes", demo_model_path, root / "hermes"), root / "words", add))


def answer(
    readers: AnswerReaders,
    tokenizer: PromptTokenizer,
    prompt: str,
    text: str,
    step: int,
    reason: FinishReason = "stop",
    **fields: Any,
) -> Choice:
    """Return the choice of an answer that arrives ``step`` tokens at a time."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Rain?"}], **fields}
    generation = structs.replace(GENERATION, token_ids=tokenizer.encode(prompt, b"r" * 16).token_ids)
    reader, whole = readers.of(parse_chat(json.dumps(body).encode()))(0, generation), WholeChoice()
    ids = tokenizer.encode(text, b"r" * 16).token_ids.tolist()
    for at in range(0, len(ids), step):
        ended = reason if at + step >= len(ids) else None
        for piece in reader.read(output(tuple(ids[at : at + step]), None, ended)):
            whole.add(piece)
    return whole.choice()


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("reasoning", ["none", "qwen3", "step3"])
@pytest.mark.parametrize("tools", CALLS)
def test_vllms_parsers_read_answers_by_name(tokenizer: PromptTokenizer, tools: str, reasoning: str, step: int) -> None:
    """Calls stand alone, after thoughts read here, and after those of vLLM's parsers, for any token batches."""
    readers = AnswerReaders(tokenizer, tools, reasoning)
    opens = "<think>\n" if reasoning == "step3" else ""
    thought = {"none": "", "qwen3": "<think>\nIs it wet?\n</think>", "step3": "Is it wet?</think>"}[reasoning]
    found = answer(readers, tokenizer, f"assistant\n{opens}", thought + CALLS[tools], step, tools=[WEATHER, SEARCH])
    assert (found.reasoning, found.text.strip(), found.finish_reason) == (
        "Is it wet?" if thought else "", "", "tool_calls",
    )  # fmt: skip
    calls = [(call.name, json.loads(call.arguments)) for call in found.calls]
    assert calls == [("get_weather", {"city": "Oslo", "days": 2}), ("search", {})]
    plain = answer(readers, tokenizer, f"assistant\n{opens}", thought + "It rains.", step)
    assert (plain.text, plain.finish_reason, plain.calls) == ("It rains.", "stop", ())


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("tools", CALLS)
def test_a_call_that_is_cut_is_whole_or_told_as_cut(tokenizer: PromptTokenizer, tools: str, step: int) -> None:
    """Wherever the length ends an answer: values cut short are never told as a whole call's, and earlier calls stay."""
    readers, whole = AnswerReaders(tokenizer, tools, "none"), [{"city": "Oslo", "days": 2}, {}]
    seen = set[tuple[bool, ...]]()
    for end in range(1, len(CALLS[tools])):
        found = answer(readers, tokenizer, "assistant\n", CALLS[tools][:end], step, "length", tools=[WEATHER, SEARCH])
        assert found.finish_reason == "length"
        assert [call.name for call in found.calls] == ["get_weather", "search"][: len(found.calls)]
        assert not any(call.cut for call in found.calls[:-1])
        for call, arguments in zip(found.calls, whole, strict=False):
            assert are_whole(call.arguments) != call.cut
            assert call.cut or json.loads(call.arguments) == arguments
        seen.add(tuple(call.cut for call in found.calls))
    assert (True,) in seen


def test_names_are_ours_and_vllms(tokenizer: PromptTokenizer) -> None:
    """An unknown one is refused with the list; so is one with tokens that the tokenizer lacks."""
    check_parser("tool_parser", "kimi_k2")
    check_parser("reasoning_parser", "minimax_m2")
    for setting, known in (("tool_parser", "kimi_k2"), ("reasoning_parser", "minimax_m2")):
        with pytest.raises(ValueError, match=f"{setting} must be one of auto.*{known}.*not 'gwen'"):
            check_parser(setting, "gwen")
    with pytest.raises(ValueError, match=r"jamba.*tool calls start/end tokens"):
        AnswerReaders(tokenizer, "jamba")


def test_parsers_that_are_called_otherwise_are_refused(
    tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new argument with a default is no difference."""
    monkeypatch.setattr(ParserManager.get_parser.__func__, "__defaults__", None)
    assert "missing a required argument: 'is_harmony'" in parsers.differences()
    with pytest.raises(RuntimeError, match=r"parsers of vLLM \S+ cannot be used: ParserManager\.get_parser: missing"):
        AnswerReaders(tokenizer, "pythonic")


def test_vllms_parser_is_found_by_what_a_template_writes(demo_model_path: Path, tmp_path: Path) -> None:
    """It reads the made-up calls back, and a call that is cut at the length is told as cut."""
    template = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}@<tool_call>
{% for c in m.tool_calls %}@<invoke name="{{ c.function.name }}">
{%- for k, v in c.function.arguments.items() %}@<{{ k }}>
{%- if v is string %}{{ v }}{% elif v is sequence %}{% for i in v %}@<item>{{ i }}@</item>{% endfor %}
{%- else %}{{ v | tojson }}{% endif %}@</{{ k }}>{% endfor %}@</invoke>
{% endfor %}@</tool_call>{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""".replace("@", "]<]minimax[>[")
    (variant_of(demo_model_path, tmp_path / "model") / "chat_template.jinja").write_text(template)
    tokenizer = PromptTokenizer(tmp_path / "model")
    assert find_parser(tokenizer) == "minimax_m3"
    readers = AnswerReaders(tokenizer, "auto")
    assert readers.unread == ""
    text = '@<tool_call>\n@<invoke name="get_weather">@<city>Oslo@</city>@</invoke>\n@</tool_call>'
    text = text.replace("@", "]<]minimax[>[")
    (call,) = answer(readers, tokenizer, "assistant\n", text, 3, tools=[WEATHER]).calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
    cut = answer(readers, tokenizer, "assistant\n", text[: text.find("lo")], 1, reason="length", tools=[WEATHER])
    assert [(call.name, call.cut) for call in cut.calls] == [("get_weather", True)]
    assert not are_whole(cut.calls[0].arguments)
