"""Find a chat template's format of tool calls: the one that reads back what the template writes for made-up calls."""

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from serve_app.api.format import ApiFinishReason
from serve_app.api.request import Tool, ToolUse
from serve_app.config.engine import vllm_missing
from serve_app.errors import InvalidRequest
from serve_app.generation.answer import Piece, SplitPiece
from serve_app.generation.reasoning import REASONING_TAGS
from serve_app.generation.tool_calls.call_reader import CallReader, WholeChoice
from serve_app.generation.tool_calls.formats import FORMATS, ToolFormat, call_id
from serve_app.generation.tool_calls.vllm_reader import VllmReader
from serve_app.tokenization.chat_template import ChatTemplate
from serve_app.tokenization.tokenizer import PromptTokenizer

VLLMS = {
    "]<]minimax[>[": "minimax_m3", "<｜DSML｜function_calls>": "deepseek_v32", "<｜DSML｜tool_calls>": "deepseek_v4",
    "<｜DSML｜ calls>": "deepseek_v41", "<|tool_call>call:": "gemma4", "<start_function_call>": "functiongemma",
    "<|plugin|>": "internlm", "<tool_calls>[": "hunyuan_a13b", "<longcat_tool_call>": "longcat",
    "<|tools_prefix|>": "apertus", "<|START_ACTION|>": "cohere_command3", "steptml:": "step3",
    "<function_calls>": "olmo3", "<|tool_call_start|>": "lfm2", "<|python_start|>[": "llama4_pythonic",
    "[get_weather(": "pythonic", "<ifm|tool_call>": "k2_horizon", "<dots_function_call>": "dots", "<|plamo:": "plamo3",
}  # fmt: skip
"""Words in a template's calls, and vLLM's parser to try for them. Source: vLLM's parsers."""

logger = logging.getLogger(__name__)

NamedArguments = tuple[str, dict[str, Any]]
"""Name and arguments."""


def _tool(name: str, **properties: Any) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "Made up.", "parameters": parameters}}


MADE_UP = (
    _tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    _tool("find_places", near={"type": "array", "items": {"type": "string"}}, open={"type": "boolean"}),
)
CALLS: tuple[NamedArguments, ...] = (
    ("get_weather", {"city": 'Oslo, "north" \\ 59°', "days": 2}),
    ("find_places", {"near": ["sea", "a wood"], "open": True}),
)
_QUESTION = {"role": "user", "content": "Will it rain?"}
_WORDS = "\ue000"
"""The content of a turn without calls: a private-use character, which no template contains."""


def written_turns(
    template: ChatTemplate, make_id: Callable[[str, int], str]
) -> Iterator[tuple[Sequence[NamedArguments], str]]:
    """Yield calls with what a template writes for a turn of them, without the text around any turn.

    One call, then two at once if the template takes both. Nothing if it refuses calls or leaves them out.
    """
    for calls in (CALLS[:1], CALLS)[: template.repairs.calls_at_once]:
        try:
            text = _turn(template, calls, make_id)
        except InvalidRequest:
            return
        if not all(name in text for name, _ in calls):
            return
        yield calls, text


def _turn(template: ChatTemplate, calls: Sequence[NamedArguments], make_id: Callable[[str, int], str]) -> str:
    def rendered(*more: dict[str, Any], **options: Any) -> str:
        return template.render([_QUESTION, *more], MADE_UP, **{"add_generation_prompt": False, **options}).text

    made = [
        {"type": "function", "id": make_id(name, at), "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    turn = rendered({"role": "assistant", "content": "", "tool_calls": made})
    before, between, behind = rendered({"role": "assistant", "content": _WORDS}).partition(_WORDS)
    if not between or not turn.startswith(before):
        begun = rendered(add_generation_prompt=True)
        before = begun if turn.startswith(begun) else _common(turn, before)
    turn = turn[len(before) :].removesuffix(behind)
    thought, name, rest = turn.partition(calls[0][0])
    ends = (thought.rfind(tags.end) + len(tags.end) for tags in REASONING_TAGS.values() if tags.end in thought)
    return (thought + name + rest)[max(ends, default=0) :]


def _common(one: str, other: str) -> str:
    """Return the text with which both begin."""
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return one[: sum(1 for _ in equal)]


def find_parser(tokenizer: PromptTokenizer) -> str:
    """Return the name of the format in which a model's template writes calls, "" if it is not known.

    If the template writes no calls, its words and special tokens decide. Where vLLM is installed, its parser of the
    family is tried after this project's; that takes seconds.
    """
    schemas = ToolUse(MADE_UP).schemas
    written = {each.make_id: tuple(written_turns(tokenizer.template, each.make_id)) for each in FORMATS.values()}
    for name, each in FORMATS.items():
        turns = written[each.make_id]
        if turns and all(_read_back(tokenizer, each.shown, _ours(each, schemas), *turn) for turn in turns):
            return name
    if not any(written.values()):
        source, special = tokenizer.template.source, tokenizer.special_tokens
        return next((name for name, each in FORMATS.items() if each.hinted(source, special)), "")
    return "" if vllm_missing() else _vllms(tokenizer)


def _ours(written: ToolFormat, schemas: dict[str, Any]) -> Callable[[], SplitPiece]:
    return lambda: CallReader(written.reading, lambda name: written.make_id(name, 0), schemas)


def _vllms(tokenizer: PromptTokenizer) -> str:
    """Return the name of vLLM's parser that reads the template's calls back, cut anywhere; "" if none does."""
    turns = list(written_turns(tokenizer.template, call_id))
    for name in dict.fromkeys(name for word, name in VLLMS.items() if any(word in text for _, text in turns)):
        try:
            from serve_app.engine.vllm.parsers import VllmParsers

            theirs = VllmParsers(tokenizer.pretrained, "", name)

            def reader(theirs: VllmParsers = theirs) -> SplitPiece:
                return VllmReader(theirs.parser([], MADE_UP, {}, thinks=False), parallel=True)

            special = tokenizer.special_tokens if theirs.shows_special else frozenset[str]()
            if all(_read_back(tokenizer, special, reader, *turn, cut=True) for turn in turns):
                return name
        except Exception as error:  # parsers fail in ways of their own, with a tokenizer that lacks their tokens
            logger.warning("vLLM's parser %s does not fit this model: %s", name, error)
    return ""


def reads_back(tokenizer: PromptTokenizer, special: frozenset[str], reader: Callable[[], SplitPiece]) -> bool:
    """Return whether a reader reads the calls back that the model's template writes, if it writes any."""
    return all(_read_back(tokenizer, special, reader, *turn) for turn in written_turns(tokenizer.template, call_id))


def _read_back(
    tokenizer: PromptTokenizer,
    special: frozenset[str],
    reader: Callable[[], SplitPiece],
    calls: Sequence[NamedArguments],
    text: str,
    *,
    cut: bool = False,
) -> bool:
    """Return whether a reader reads these calls in a text, and nothing else. ``cut``: it reads no others if it is cut.

    The text goes through the tokenizer, token by token, like an answer.
    """
    ids = tokenizer.encode(text, bytes(16)).token_ids.tolist()
    for end in range(1 if cut else len(ids), len(ids) + 1):
        split, whole, decoder = reader(), WholeChoice(), tokenizer.decoder(special)
        for at, token_id in enumerate(ids[:end], 1):
            last = at == end
            decoded = decoder.push((token_id,)) + (decoder.flush() if last else "")
            reason: ApiFinishReason | None = None if not last else "stop" if end == len(ids) else "length"
            for piece in split.split(Piece(0, decoded, 1, None, reason, token_ids=(token_id,))):
                whole.add(piece)
        choice = whole.choice()
        read = [(call.name, json.loads(call.arguments)) for call in choice.calls if not call.cut]
        if read != list(calls[: len(read)]) or (end == len(ids) and (len(read) < len(calls) or choice.text.strip())):
            return False
    return True
