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

VERSION = "0.32"
"""The supported version of vLLM."""

_RESTED_ON: tuple[tuple[Callable[..., Any], str], ...] = (
    (Parser.__init__, "self tokenizer tools args model_config kwargs"),
    (Parser.parse_delta, "self delta_text delta_token_ids request prompt_token_ids finished"),
    (
        ParserManager.get_parser,
        "tool_parser_name reasoning_parser_name enable_auto_tools model_name is_harmony tool_strict_level tokenizer",
    ),
)

Push = Callable[..., DeltaMessage | None]
"""(text, its token ids, finished=whether the answer has ended) -> the resulting addition to the answer."""


def parser_names(setting: str) -> list[str]:
    """Return the allowed names of ``reasoning_parser`` or ``tool_parser``."""
    manager = ReasoningParserManager if setting == "reasoning_parser" else ToolParserManager
    return list(manager.list_registered())


class VllmParsers:
    """Makes vLLM's parsers for answers of one tokenizer; ``reasoning``, ``tools``: their names, "" for none.

    ``tags``: around reasoning, "" if they are not fixed. ``shows_special``: special tokens are part of the text. Raises
    RuntimeError for another vLLM, ValueError for a tokenizer without a parser's tokens.
    """

    def __init__(self, tokenizer: Any, reasoning: str, tools: str) -> None:
        wrong = [] if vllm.__version__.startswith(f"{VERSION}.") else ["its version differs"]
        for function, parameters in _RESTED_ON:
            if list(inspect.signature(function).parameters) != parameters.split():
                wrong.append(f"{function.__qualname__} takes other arguments")
        if wrong:
            raise RuntimeError(
                f"warmpath reads answers with the parsers of vLLM {VERSION}, and this is vLLM {vllm.__version__}: "
                f"{'; '.join(wrong)}. Install vLLM {VERSION}, or set reasoning_parser and tool_parser to auto."
            )
        self._tokenizer = tokenizer
        more = {"enable_auto_tools": True, "model_name": tokenizer.name_or_path, "tokenizer": tokenizer}
        make = partial(ParserManager.get_parser, **more)
        try:
            self._kinds = {
                (thinks, calls): make((calls and tools) or None, (thinks and reasoning) or None)
                for thinks in (True, False)
                for calls in (True, False)
            }
        except TypeError as error:
            raise ValueError(str(error)) from error
        probe = _request([{"type": "function", "function": {"name": "f"}}])
        parser = self._kinds[True, True](tokenizer, probe.tools)
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
