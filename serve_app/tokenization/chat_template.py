"""Renders conversations with the checkpoint's own chat template, or raises a 400 with the reason."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from jinja2.exceptions import TemplateError

from serve_app.errors import InvalidRequest

_WORD = re.compile(r"\w+")
OTHER_WORDS: Mapping[str, Any] = {"role": "user", "content": "\ue000\ue001\ue000"}
"""A message of private-use characters, which no template or conversation contains."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered conversation. ``system_text``: the formatted system prompt, a prefix of ``text``."""

    text: str
    system_text: str


class ChatTemplate:
    """The chat template of a transformers tokenizer. Any thread may render."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = frozenset((*parameters, *tokenizer.SPECIAL_TOKENS_ATTRIBUTES))
        # Computed once, because templates have many thousand characters.
        self._words = frozenset(_WORD.findall(self.source))

    @property
    def source(self) -> str:
        """The template's text, or the text of all named templates."""
        return str(self._tokenizer.chat_template or "")

    @property
    def reads_tools(self) -> bool:
        """Whether the template uses the variable ``tools``."""
        return not any(self.unread(["tools"]))

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
                "This model has no chat template; use /v1/completions, or set apply_chat_template to false.",
                param="messages",
            )
        for name in kwargs:
            if name in self._reserved:
                raise InvalidRequest(f"chat_template_kwargs must not set {name}.", param="chat_template_kwargs")
        more = {"continue_final_message": True} if continue_final_message else {}
        try:
            text = self._apply(messages, add_generation_prompt, {**kwargs, **more}, tools)
        except InvalidRequest:
            messages = _alternating(messages)
            text = self._apply(messages, add_generation_prompt, {**kwargs, **more}, tools)
        leading = list(takewhile(lambda message: message["role"] == "system", messages))
        if not leading and not tools:
            return RenderedPrompt(text, "")
        try:
            probe = self._apply([*leading, OTHER_WORDS] if tools else leading, False, kwargs, tools)
        except InvalidRequest:
            return RenderedPrompt(text, "")
        if tools:
            before, marker, _ = probe.partition(OTHER_WORDS["content"])
            return RenderedPrompt(text, before if marker and text.startswith(before) else "")
        if not text.startswith(probe):
            equal = takewhile(lambda pair: pair[0] == pair[1], zip(text, probe, strict=False))
            probe = text[: sum(1 for _ in equal)]
        return RenderedPrompt(text, probe)

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


def _alternating(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages for strict templates: one system message at the start, later ones as user turns."""
    told: list[Mapping[str, Any]] = []
    for message in messages:
        before, role = told[-1]["role"] if told else "system", message["role"]
        role = "user" if role == "system" != before else role
        if told and before == role in ("system", "user"):
            told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n\n{message['content']}"}
        else:
            told.append({**message, "role": role})
    return told
