"""vLLM's parsers of reasoning and tool calls, by name, for text that this process reads: they need no engine.

The import is slow, so it happens only if a setting names a parser.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import vllm
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.abstract_parser import Parser
from vllm.parser.parser_manager import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

_CALLS: tuple[tuple[Callable[..., Any], str, str], ...] = (
    (Parser.__init__, "self tokenizer tools", "chat_template_kwargs"),
    (Parser.parse_delta, "self delta_text delta_token_ids", "request prompt_token_ids finished"),
    (ParserManager.get_parser, "tool_parser reasoning_parser", "enable_auto_tools model_name"),
)
"""What is called here, with which positional and which named arguments."""

Push = Callable[..., DeltaMessage | None]
"""(text, its token ids, finished=whether the answer has ended) -> the resulting addition to the answer."""


def parser_names(setting: str) -> list[str]:
    """Return the allowed names of ``reasoning_parser`` or ``tool_parser``."""
    manager = ReasoningParserManager if setting == "reasoning_parser" else ToolParserManager
    return list(manager.list_registered())


def differences() -> str:
    """Return how vLLM's parsers differ from those that can be called here, "" if they do not."""
    wrong = []
    for function, positional, named in _CALLS:
        try:
            inspect.signature(function).bind(*positional.split(), **dict.fromkeys(named.split()))
        except TypeError as error:
            wrong.append(f"{function.__qualname__}: {error}")
    return "; ".join(wrong)


class VllmParsers:
    """Makes vLLM's parsers for answers of one tokenizer; ``reasoning``, ``tools``: their names, "" for none.

    ``tags``: around reasoning, "" if they are not fixed. ``shows_special``: special tokens are part of the text. Raises
    RuntimeError if vLLM's parsers differ, ValueError for a tokenizer without a parser's tokens.
    """

    def __init__(self, tokenizer: Any, reasoning: str, tools: str) -> None:
        if wrong := differences():
            raise RuntimeError(
                f"the parsers of vLLM {vllm.__version__} cannot be used: {wrong}. Set reasoning_parser and tool_parser "
                "to auto, or install another vLLM."
            )
        self._tokenizer = tokenizer
        more: dict[str, Any] = {"enable_auto_tools": True, "model_name": tokenizer.name_or_path}
        if "tokenizer" in inspect.signature(ParserManager.get_parser).parameters:  # since 0.32 it is checked at once
            more["tokenizer"] = tokenizer
        make = partial(ParserManager.get_parser, **more)
        try:
            self._kinds = {
                (thinks, calls): make((calls and tools) or None, (thinks and reasoning) or None)
                for thinks in (True, False)
                for calls in (True, False)
            }
            probe = _request([{"type": "function", "function": {"name": "f"}}])
            parser = self._kinds[True, True](tokenizer, probe.tools)
        except (TypeError, RuntimeError) as error:
            raise ValueError(str(error)) from error
        self.shows_special = not parser.adjust_request(probe).skip_special_tokens
        start, end = (getattr(parser.reasoning_parser, f"reasoning_{at}_str", None) for at in ("start", "end"))
        self.tags: tuple[str, str] = (start or "", end or "")

    def parser(
        self, prompt: list[int], tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], *, thinks: bool
    ) -> Push:
        """Return a function that reads an answer token by token. ``tools``: none if calls are not read.

        ``kwargs``: variables of the chat template. ``thinks``: whether reasoning is read.
        """
        request = _request(tools)
        parser = self._kinds[thinks, bool(tools)](self._tokenizer, request.tools, chat_template_kwargs=dict(kwargs))
        return partial(parser.parse_delta, request=request, prompt_token_ids=prompt)


def _request(tools: Sequence[Mapping[str, Any]]) -> ChatCompletionRequest:
    fields = {"tools": list(tools), "tool_choice": "auto"} if tools else {}
    return ChatCompletionRequest.model_validate({"model": "", "messages": [], **fields})
