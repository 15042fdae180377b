"""Renders conversations with the checkpoint's own chat template, or raises a 400 with the reason."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from jinja2.exceptions import TemplateError

from serve_app.errors import InvalidRequest
from serve_app.tokenization.repairs import PROBES, Chat, Repairs, left_out

_WORD = re.compile(r"\w+")
OTHER_WORDS: Mapping[str, Any] = {"role": "user", "content": "\ue000\ue001\ue000"}
"""A message of private-use characters, which no template or conversation contains."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered conversation. ``system_text``: the formatted system prompt, a prefix of ``text``."""

    text: str
    system_text: str


class ChatTemplate:
    """The chat template of a transformers tokenizer. Any thread may render. ``as_is``: like vLLM, without repairs."""

    def __init__(self, tokenizer: Any, *, as_is: bool = False) -> None:
        self._tokenizer = tokenizer
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = frozenset((*parameters, *tokenizer.SPECIAL_TOKENS_ATTRIBUTES))
        # Computed once, because templates have many thousand characters.
        self._words = frozenset(_WORD.findall(self.source))
        self._as_is = as_is
        self.repairs = Repairs(lambda messages, tools: self._apply(messages, True, {}, tools), () if as_is else PROBES)

    @property
    def source(self) -> str:
        """The template's text, or the text of all named templates."""
        return str(self._tokenizer.chat_template or "")

    @property
    def reads_tools(self) -> bool:
        """Whether prompts show tools to the model."""
        return self.repairs.shows_tools

    @property
    def tells_tools(self) -> bool:
        """Whether the template leaves tools out, so that prompts tell them in a system message."""
        return self.repairs.tells_tools

    @property
    def notes(self) -> list[str]:
        """A sentence for each thing that the template does not take, and what is done about it."""
        return self.repairs.said

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> RenderedPrompt:
        """Return the rendered conversation. ``kwargs``: more variables of the template.

        ``continue_final_message``: no template text follows the last message. ``system_text``: the rendered leading
        system messages alone, as far as the whole text begins with them, "" without any. With ``tools`` it is all text
        before the first other message, because templates write tools before, after or in place of a system prompt.
        Raises InvalidRequest without a template, or for messages that it refuses.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions, set apply_chat_template to false, or give the "
                "server one (setting chat_template).",
                param="messages",
            )
        for name in kwargs:
            if name in self._reserved:
                raise InvalidRequest(f"chat_template_kwargs must not set {name}.", param="chat_template_kwargs")
        more = {"continue_final_message": True} if continue_final_message else {}
        mended = self.repairs.mended(Chat(messages, tools))
        text = self._apply(mended.messages, add_generation_prompt, {**kwargs, **more}, mended.tools)
        lost = None if self._as_is else left_out(messages, text)
        if lost is not None:
            role = messages[lost]["role"]
            raise InvalidRequest(
                f"The model's chat template leaves out message {lost}, of the role {role}; say it in another way.",
                param="messages",
            )
        leading = list(takewhile(lambda message: message["role"] == "system", messages))
        if not tools and (not leading or text.startswith(alone := self._alone(leading, kwargs))):
            return RenderedPrompt(text, alone if leading else "")
        before, marker, _ = self._alone([*leading, OTHER_WORDS], kwargs, tools).partition(OTHER_WORDS["content"])
        return RenderedPrompt(text, before if marker and text.startswith(before) else "")

    def _alone(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return a part of a conversation in the template's form; of what it refuses, private-use characters."""
        mended = self.repairs.mended(Chat(messages, tools))
        try:
            return self._apply(mended.messages, False, kwargs, mended.tools)
        except InvalidRequest:
            return "\ue002"

    def unread(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the variable names that do not occur in the template, and therefore have no effect."""
        return (name for name in names if name not in self._words)

    def _apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools or None,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **kwargs,
                )
            )
        except TemplateError as error:
            reason = str(error)[:200] or type(error).__name__
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {reason}", param="messages"
            ) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest(
                "The model's chat template cannot render these messages; check roles, contents and "
                "chat_template_kwargs.",
                param="messages",
            ) from error
