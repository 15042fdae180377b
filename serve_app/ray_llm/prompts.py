"""Turn a request of Ray's ingress, parsed or raw, into the prompt that vLLM will compute, where that is possible."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app.errors import InvalidRequest
from serve_app.generation.prompt import placement_key
from serve_app.tokenization.chat_template import RenderedPrompt
from serve_app.tokenization.tokenizer import EncodedPrompt, PromptTokenizer

_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]


class PromptEncoder:
    """Renders and tokenizes requests by their bodies' fields. ``source``: a directory, or a repository's name."""

    def __init__(self, source: str, block_size: int) -> None:
        """Load the tokenizer, which takes seconds. Raises OSError, ValueError."""
        self._tokenizer = PromptTokenizer(_directory(source), block_size=block_size, as_is=True)

    async def encode(self, body: Any, root: bytes, tenant: str) -> tuple[EncodedPrompt, bytes] | None:
        """Return a body's prompt and its placement key, None for one that is routed by load.

        Such bodies have several prompts, media, or a prompt that the template refuses; vLLM answers with the error.
        """
        try:
            text, system_text, special = getattr(body, "prompt", None), "", True
            messages = getattr(body, "messages", None)
            if messages is not None:
                rendered = await self._render(body, [_message(message) for message in messages], tenant)
                text, system_text, special = rendered.text, rendered.system_text, False
            if isinstance(text, str):
                special = bool(getattr(body, "add_special_tokens", special))
                encoded = await self._tokenizer.encode_async(text, root, tenant, add_special_tokens=special)
            elif isinstance(text, list) and text and all(isinstance(token, int) for token in text):
                encoded = self._tokenizer.encode_ids(text, root)
            else:
                return None
            return encoded, placement_key(root, getattr(body, "prompt_cache_key", None), encoded, system_text)
        except (InvalidRequest, TypeError, ValueError, KeyError):
            return None

    async def _render(self, body: Any, messages: list[dict[str, Any]], tenant: str) -> RenderedPrompt:
        if getattr(body, "documents", None):
            raise ValueError("documents")
        kwargs = dict(getattr(body, "chat_template_kwargs", None) or {})
        effort = getattr(body, "reasoning_effort", None)
        if effort is not None:  # as vLLM does
            kwargs = {"enable_thinking": effort != "none", **kwargs, "reasoning_effort": effort}
        kwargs["add_generation_prompt"] = getattr(body, "add_generation_prompt", True)
        kwargs["continue_final_message"] = getattr(body, "continue_final_message", False)
        tools = [_plain(tool) for tool in getattr(body, "tools", None) or ()]
        chars = sum(len(message.get("content") or "") for message in messages)
        return await self._tokenizer.render_async(messages, tenant, chars, tools, **kwargs)


def _message(message: Any) -> dict[str, Any]:
    """Return a message with its text parts joined. Raises ValueError for media."""
    plain = _plain(message)
    content = plain.get("content")
    if content is None or isinstance(content, str):
        return plain
    parts = [_plain(part) for part in content]
    if any(part.get("type") != "text" for part in parts):
        raise ValueError("media")
    return {**plain, "content": "\n".join(part["text"] for part in parts)}


def _plain(value: Any) -> dict[str, Any]:
    """Return a mapping, or a pydantic model, as a dict of its fields that are set."""
    return dict(value) if isinstance(value, Mapping) else dict(value.model_dump(exclude_none=True))


def _directory(source: str) -> Path:
    """Return the directory of the tokenizer's files, downloading them if they are not on this machine."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=_TOKENIZER_FILES))
