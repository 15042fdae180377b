"""Over real chat templates: what a template writes for calls is read back as these calls, or named as unread."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from serve_app.api.request import ToolUse
from serve_app.checkpoints.demo_model import ensure_demo_model
from serve_app.config.engine import vllm_missing
from serve_app.generation.answer import Piece
from serve_app.generation.tool_calls.call_reader import CallReader, WholeChoice
from serve_app.generation.tool_calls.formats import FORMATS
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.generation.tool_calls.round_trip import CALLS, MADE_UP, find_parser, written_turns
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.tokenization.variants import variant_of
from tests.templates.wheel import chat_templates, each_template

MARK = re.compile(r"<\|[a-zA-Z_]+\|>|<｜[^｜<>]+｜>|\[/?[A-Z_]+\]")
UNREAD = {"MiniMax-M3", "deepseek-v3", "gpt-oss", "qwen1.5-chat"}
"""Models whose templates write calls that no reader of this project reads; vLLM's reads MiniMax-M3's.

Those of qwen1.5-chat and deepseek-v3 are JSON with quotes missing or of the wrong kind.
"""


def tokenizer_of(name: str, target: Path) -> PromptTokenizer:
    """Return the demo model's tokenizer with a real template, whose marks are special tokens."""
    template = chat_templates()[name]

    def add(tokenizer: Tokenizer) -> None:
        tokenizer.add_special_tokens([AddedToken(word, special=True) for word in sorted(set(MARK.findall(template)))])

    (variant_of(ensure_demo_model("demo"), target, add) / "chat_template.jinja").write_text(template)
    return PromptTokenizer(target)


@each_template()
def test_a_templates_calls_are_read_back_or_named(name: str, tmp_path: Path) -> None:
    """One call and two, whole and cut at every character; a format that is not read has a sentence that says so."""
    tokenizer = tokenizer_of(name, tmp_path / "model")
    if not tokenizer.template.reads_tools:
        return  # requests with tools are refused
    if tokenizer.template.tells_tools:
        assert AnswerReaders(tokenizer, "auto").unread == ""  # a message tells the form of calls
        return
    parser, turns = find_parser(tokenizer), list(written_turns(tokenizer.template, lambda call, at: f"abcdefgh{at}"))
    read_by_the_library = name == "gpt-oss" and importlib.util.find_spec("openai_harmony") is not None
    assert bool(AnswerReaders(tokenizer, "auto").unread) == (not parser) or read_by_the_library
    if parser not in FORMATS:
        assert not turns or name in UNREAD
        assert not parser or not vllm_missing()
        return
    written, schemas = FORMATS[parser], ToolUse(MADE_UP).schemas
    turns = list(written_turns(tokenizer.template, written.make_id))
    assert turns
    for calls, text in turns:
        for end in range(len(text) + 1):
            reader, whole = CallReader(written.reading, lambda call: "id", schemas), WholeChoice()
            for at in range(end):
                for piece in reader.split(Piece(0, text[at], finish_reason="stop" if at + 1 == end else None)):
                    whole.add(piece)
            read: list[tuple[str, Any]] = [(call.name, json.loads(call.arguments)) for call in whole.choice().calls]
            assert read == list(calls[: len(read)])
        assert read == list(calls)


def test_the_made_up_calls_have_every_kind_of_value() -> None:
    kinds = {type(value) for _, arguments in CALLS for value in arguments.values()}
    assert kinds == {str, int, list, bool}
