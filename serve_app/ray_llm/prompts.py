"""A request as Ray's ingress has it, parsed or raw, to the prompt that vLLM will compute, where that can be said."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from serve_app.errors import InvalidRequest
from serve_app.tokenization.tokenizer import EncodedPrompt, PromptTokenizer

_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]


class Prompts:
    """Renders and tokenizes requests by their bodies' fields. ``source``: a directory, or a repository's name."""

    def __init__(self, source: str, block_size: int) -> None:
        """Load the tokenizer, which takes seconds. Raises OSError, ValueError."""
        self._tokenizer = PromptTokenizer(_directory(source), block_size=block_size)

    async def encode(self, body: Any, root: bytes, tenant: str) -> tuple[EncodedPrompt, str] | None:
        """Return a body's prompt and its system prompt's text, None for what is routed by load.

        So are several prompts in one request, media, and what a template refuses: vLLM's answer says what is wrong.
        """
        try:
            messages = getattr(body, "messages", None)
            if messages is not None:
                return await self._chat(body, [_message(message) for message in messages], root, tenant)
            prompt, special = getattr(body, "prompt", None), getattr(body, "add_special_tokens", True)
            if isinstance(prompt, str):
                encoded = self._tokenizer.encode_async(prompt, root, tenant, add_special_tokens=bool(special))
                return await encoded, ""
            if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
                return self._tokenizer.encode_ids(prompt, root), ""
        except (InvalidRequest, TypeError, ValueError, KeyError):
            return None
        return None

    async def _chat(
        self, body: Any, messages: list[dict[str, Any]], root: bytes, tenant: str
    ) -> tuple[EncodedPrompt, str]:
        if getattr(body, "documents", None):
            raise ValueError("documents")
        kwargs, effort = (
            dict(getattr(body, "chat_template_kwargs", None) or {}),
            getattr(body, "reasoning_effort", None),
        )
        if effort is not None:  # as vLLM does
            kwargs = {"enable_thinking": effort != "none", **kwargs, "reasoning_effort": effort}
        kwargs["add_generation_prompt"] = getattr(body, "add_generation_prompt", True)
        kwargs["continue_final_message"] = getattr(body, "continue_final_message", False)
        tools = [_plain(tool) for tool in getattr(body, "tools", None) or ()]
        chars = sum(len(message.get("content") or "") for message in messages)
        rendered = await self._tokenizer.render_async(messages, tenant, chars, tools, **kwargs)
        special = bool(getattr(body, "add_special_tokens", False))
        encode = partial(self._tokenizer.encode_async, add_special_tokens=special)
        return await encode(rendered.text, root, tenant), rendered.system_text


def _message(message: Any) -> dict[str, Any]:
    """Return a message with its parts of text as one. Raises ValueError for media."""
    plain = _plain(message)
    content = plain.get("content")
    if content is None or isinstance(content, str):
        return plain
    parts = [_plain(part) for part in content]
    if any(part.get("type") != "text" for part in parts):
        raise ValueError("media")
    return {**plain, "content": "\n".join(part["text"] for part in parts)}


def _plain(value: Any) -> dict[str, Any]:
    """Return a mapping, or a model of pydantic, as a dict of its fields that are set."""
    return dict(value) if isinstance(value, Mapping) else dict(value.model_dump(exclude_none=True))


def _directory(source: str, allow: Sequence[str] = tuple(_TOKENIZER_FILES)) -> Path:
    """Return where the tokenizer's files are, fetched where they are not on this machine."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=list(allow)))
