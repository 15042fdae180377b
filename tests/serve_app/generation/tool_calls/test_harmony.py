"""gpt-oss' harmony format in all APIs, with OpenAI's library; the vocabulary of the checkpoint serves it."""

import base64
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from serve_app.generation.tool_calls import harmony
from serve_app.generation.tool_calls.harmony import Harmony
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.structured.compiler import GrammarCompiler
from serve_app.structured.matcher import AnswerMatcher
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.ingress.scripted import PATIENCE_S, Script, scripted
from tests.serve_app.tokenization.variants import variant_of
from tests.serve_app.tool_templates.families import SEARCH, WEATHER

TEMPLATE = """{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}{% set f = message.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>
{%- elif message.role == "assistant" -%}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
THOUGHT, ANSWER = "Is it <|wet|>? END", "It rains.\n\nSo."
THINKS = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
SAYS = f"<|channel|>final<|message|>{ANSWER}<|return|>"
ASKED: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Rain?"}]}


def vocabulary() -> Path | None:
    """Return o200k_base, which some packages bring under a name that its URL gives."""
    if base := os.environ.get("TIKTOKEN_ENCODINGS_BASE"):
        return Path(base) / "o200k_base.tiktoken"
    if (found := importlib.util.find_spec("litellm")) and found.origin:
        path = Path(found.origin).parent / "litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"
        return path if path.is_file() else None
    return None


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("openai_harmony") is None or vocabulary() is None,
    reason="pip install openai-harmony litellm",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, path = tmp_path_factory.mktemp("encodings"), vocabulary()
    assert path is not None
    shutil.copy(path, directory / "o200k_base.tiktoken")
    return directory


@pytest.fixture(scope="module", autouse=True)
def with_base(base: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(base))
        yield


@pytest.fixture(scope="module")
def gpt_oss(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, with gpt-oss' marks and a template in its form."""

    def add(tokenizer: Tokenizer) -> None:
        tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in sorted(harmony.MARKS)])

    path = variant_of(demo_model_path, tmp_path_factory.mktemp("gpt-oss") / "model", add)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def served(gpt_oss: Path) -> Iterator[tuple[str, Script]]:
    with scripted(gpt_oss) as found:
        yield found


@pytest.fixture
def client(served: tuple[str, Script]) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served[0]}/v1", api_key="k", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def chat(client: OpenAI, **fields: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    """Return a chat's reasoning, content, calls and reason; streamed, it is the same."""
    choice = client.chat.completions.create(**ASKED, **fields).choices[0]
    with client.chat.completions.stream(**ASKED, **fields) as stream:
        chunks = [event.chunk.choices[0] for event in stream if event.type == "chunk" and event.chunk.choices]
    deltas = [chunk.delta for chunk in chunks]
    found = (
        choice.message.reasoning_content or "" if hasattr(choice.message, "reasoning_content") else "",
        choice.message.content or "",
        [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []],
        choice.finish_reason,
    )
    called = "".join(call.function.arguments or "" for delta in deltas for call in delta.tool_calls or ())
    assert "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas) == found[0]
    assert "".join(delta.content or "" for delta in deltas) == found[1]
    assert ([json.loads(called)] if called else []) == [arguments for _, arguments in found[2]]
    assert chunks[-1].finish_reason == found[3]
    return found


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_chat_has_reasoning_calls_and_answer_apart(client: OpenAI, served: tuple[str, Script], step: int) -> None:
    """Words like marks are text; a preamble is content; without tools a call is text. (docs: api)"""
    script, tools = served[1], [WEATHER, SEARCH]
    script.step = step
    weather = [("get_weather", {"city": "Oslo"})]
    for text, fields, found in (
        (THINKS + SAYS, {}, (THOUGHT, ANSWER, [], "stop")),
        (THINKS + SAYS, {"tools": tools}, (THOUGHT, ANSWER, [], "stop")),
        (THINKS + CALL, {"tools": tools}, (THOUGHT, "", weather, "tool_calls")),
        (CALL.removesuffix("<|call|>"), {"tools": tools}, ("", "", weather, "tool_calls")),
        (f"<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant{CALL}", {"tools": tools},
         ("", "Let me look.", weather, "tool_calls")),
        (' to=functions.search<|channel|>commentary json<|message|>{}<|call|>', {"tools": tools},
         ("", "", [("search", {})], "tool_calls")),
        (THINKS + CALL, {}, (THOUGHT, '{"city": "Oslo"}', [], "stop")),
        ("Plain words.", {}, ("", "Plain words.", [], "stop")),
        (THINKS + "<|channel|>fi", {}, (THOUGHT, "", [], "stop")),
        (THINKS + SAYS, {"stop": ["END", "rain"]}, (THOUGHT, "It ", [], "stop")),
        (THINKS + SAYS, {"stop": ["\n\n"]}, (THOUGHT, "It rains.", [], "stop")),
    ):  # fmt: skip
        script.text = text
        assert chat(client, **fields) == found, text


def test_responses_and_messages_have_them_apart(client: OpenAI, served: tuple[str, Script]) -> None:
    """Whole and streamed."""
    url, script = served
    script.step = 1
    tool: Any = {"type": "function", **WEATHER["function"]}
    ours: Any = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    for text, item, block in ((THINKS + SAYS, "message", "text"), (THINKS + CALL, "function_call", "tool_use")):
        script.text = text
        whole = client.responses.create(model="demo", input="Rain?", tools=[tool])
        events = list(client.responses.create(model="demo", input="Rain?", tools=[tool], stream=True))
        for response in (whole, events[-1].response):
            assert [each.type for each in response.output] == ["reasoning", item]
            assert response.output[0].content[0].text == THOUGHT
        with Anthropic(base_url=url, api_key="k", max_retries=0, timeout=PATIENCE_S) as anthropic:
            message = anthropic.messages.create(**ASKED, max_tokens=99, tools=[ours])
            with anthropic.messages.stream(**ASKED, max_tokens=99, tools=[ours]) as stream:
                streamed = stream.get_final_message()
        for told in (message, streamed):
            assert [each.type for each in told.content] == ["thinking", block]
            assert told.content[0].thinking == THOUGHT


def test_reasoning_may_come_again_behind_a_preamble(client: OpenAI, served: tuple[str, Script]) -> None:
    """Every text is told, in each API, streamed or not."""
    url, script = served
    script.step = 1
    script.text = f"<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant{THINKS}{SAYS}"
    assert chat(client)[:2] == (THOUGHT, f"Let me look.{ANSWER}")
    whole = client.responses.create(model="demo", input="Rain?")
    streamed = list(client.responses.create(model="demo", input="Rain?", stream=True))[-1].response
    with Anthropic(base_url=url, api_key="k", max_retries=0, timeout=PATIENCE_S) as anthropic:
        message = anthropic.messages.create(**ASKED, max_tokens=99)
        with anthropic.messages.stream(**ASKED, max_tokens=99) as stream:
            told = [message.content, stream.get_final_message().content]
    for output in (whole.output, streamed.output):
        assert "".join(each.content[0].text for each in output if each.type == "reasoning") == THOUGHT
        assert "".join(each.content[0].text for each in output if each.type == "message") == f"Let me look.{ANSWER}"
    for blocks in told:
        assert "".join(each.thinking for each in blocks if each.type == "thinking") == THOUGHT
        assert "".join(each.text for each in blocks if each.type == "text") == f"Let me look.{ANSWER}"


def test_an_answer_that_must_call_is_a_list_in_the_final_channel(
    client: OpenAI, served: tuple[str, Script], gpt_oss: Path
) -> None:
    script = served[1]
    forced = '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'
    script.text = f"{THINKS}<|channel|>final<|message|>{forced}"
    found = chat(client, tools=[WEATHER], tool_choice="required")
    assert found == (THOUGHT, "", [("get_weather", {"city": "Oslo"})], "tool_calls")
    tokenizer = PromptTokenizer(gpt_oss)
    compiled = GrammarCompiler(gpt_oss, tokenizer.vocab_size, [2]).compile(script.asked[-1].grammar)
    for text, fits in ((script.text, True), (f"<|channel|>final<|message|>{forced}", True), (forced, False)):
        ids = tokenizer.encode(text, b"r" * 16).token_ids
        assert (AnswerMatcher(compiled).allowed(ids) is not None) == fits


def test_the_format_is_found_or_its_lack_is_named(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library, or with a tokenizer of another vocabulary and no file, the remedy is named."""
    tokenizer = PromptTokenizer(gpt_oss)
    readers = AnswerReaders(tokenizer, "auto")
    assert (readers.unread, readers.thinks) == ("", True)
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE")
    assert "set TIKTOKEN_ENCODINGS_BASE" in AnswerReaders(tokenizer, "auto").unread
    with pytest.raises(ValueError, match="set TIKTOKEN_ENCODINGS_BASE"):
        AnswerReaders(tokenizer, "openai")
    monkeypatch.setattr(harmony.importlib.util, "find_spec", lambda name: None)
    assert "pip install openai-harmony" in AnswerReaders(tokenizer, "auto").unread


def test_the_vocabulary_of_the_checkpoint_serves_the_library(
    gpt_oss: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is downloaded, and the environment stays as it was."""
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE")
    chars = {byte: char for char, byte in harmony_bytes().items()}
    lines = (base / "o200k_base.tiktoken").read_text().splitlines()
    words = {
        "".join(chars[byte] for byte in base64.b64decode(line.split()[0])): rank for rank, line in enumerate(lines)
    }
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in sorted(harmony.MARKS)])
    path = variant_of(gpt_oss, tmp_path / "model")
    made.save(str(path / "tokenizer.json"))
    assert Harmony(PromptTokenizer(path)).tokens("rain", special=False)
    assert "TIKTOKEN_ENCODINGS_BASE" not in os.environ


def harmony_bytes() -> dict[str, int]:
    from serve_app.tokenization.detokenizer import _byte_of_char

    return _byte_of_char()


def test_a_call_that_the_length_cuts_is_told_as_far_as_it_came(client: OpenAI, served: tuple[str, Script]) -> None:
    """With its name and the beginning of its arguments; nothing of it is text. (docs: api)"""
    served[1].clear()
    served[1].text, served[1].reason = THINKS + CALL[: CALL.index("Oslo") + 2], "length"
    try:
        choice = client.chat.completions.create(**ASKED, tools=[WEATHER], parallel_tool_calls=False).choices[0]  # type: ignore[list-item]
    finally:
        served[1].clear()
    (call,) = choice.message.tool_calls or []
    assert (choice.message.content, choice.finish_reason) == (None, "length")
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Os')  # type: ignore[union-attr]
