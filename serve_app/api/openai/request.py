"""OpenAI's request bodies (chat completions, completions) -> GenerateRequest.

Owns which fields are read, OpenAI's defaults and bounds, and which fields are refused because ignoring them would
give another answer than the client asked for. Fields that change nothing here are ignored. Knows no tokenizer.
"""

from __future__ import annotations

from typing import Any

from serve_app.api.json_body import INT64, Body
from serve_app.api.request import GenerateRequest, Prompt
from serve_app.errors import InvalidRequest

MAX_CHOICES = 16
MAX_PROMPTS = 128
"""Bounds prompts, and prompts times ``n``, of one completion request."""
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_KEY_CHARS = 1024
MAX_TOKENS = 2**31 - 1
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; a chat has none."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_REFUSED: dict[str, tuple[Any, ...]] = {
    # field: values that ask for nothing
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
_REFUSED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "continue_final_message": (False,),
}
_REFUSED_IN_COMPLETION: dict[str, tuple[Any, ...]] = {
    "logprobs": (),  # 0 asks for the chosen tokens' own
    "echo": (False,),
    "suffix": ("",),
}


def parse_chat(body: bytes) -> GenerateRequest:
    """Read the body of ``POST /v1/chat/completions``. Raises InvalidRequest, and nothing else, when it is wrong."""
    fields = Body.parse(body)
    _refuse(fields, _REFUSED_IN_CHAT)
    fields.object("chat_template_kwargs")
    template_kwargs: dict[str, Any] = fields.raw("chat_template_kwargs") or {}
    for name in ("messages", "add_generation_prompt"):
        if name in template_kwargs:
            raise InvalidRequest(f"chat_template_kwargs must not set {name}.", param="chat_template_kwargs")
    max_tokens = fields.integer("max_tokens", 1, MAX_TOKENS)
    max_completion_tokens = fields.integer("max_completion_tokens", 1, MAX_TOKENS)
    return GenerateRequest(
        kind="chat",
        messages=_messages(fields),
        max_tokens=max_tokens if max_completion_tokens is None else max_completion_tokens,
        apply_chat_template=fields.boolean("apply_chat_template", True),
        add_generation_prompt=fields.boolean("add_generation_prompt", True),
        chat_template_kwargs=template_kwargs,
        **_common(fields),
    )


def parse_completion(body: bytes) -> GenerateRequest:
    """Read the body of ``POST /v1/completions``. Raises InvalidRequest, and nothing else, when it is wrong."""
    fields = Body.parse(body)
    _refuse(fields, _REFUSED_IN_COMPLETION)
    common = _common(fields)
    fields.refuse_unless("best_of", common["n"])
    max_tokens = fields.integer("max_tokens", 1, MAX_TOKENS)
    prompts = _prompts(fields)
    if len(prompts) * common["n"] > MAX_PROMPTS:
        raise fields.fault("n", f"at most {MAX_PROMPTS // len(prompts)} for {len(prompts)} prompts")
    return GenerateRequest(
        kind="completion",
        prompts=prompts,
        max_tokens=COMPLETION_MAX_TOKENS if max_tokens is None else max_tokens,
        **common,
    )


def _refuse(fields: Body, more: dict[str, tuple[Any, ...]]) -> None:
    for name, neutral in (_REFUSED | more).items():
        fields.refuse_unless(name, *neutral)


def _common(fields: Body) -> dict[str, Any]:
    """Read what chat and completion requests share."""
    model = fields.text("model", 256)
    if model is None:
        raise InvalidRequest("model is missing; name the model to use, see GET /v1/models.", param="model")
    n = fields.integer("n", 1, MAX_CHOICES)
    temperature = fields.number("temperature", "a number from 0 to 2", 0, 2)
    top_p = fields.number("top_p", "a number above 0 and at most 1", 0, 1, low_excluded=True)
    stream = fields.boolean("stream", False)
    options = fields.object("stream_options")
    if options is not None and not stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    return {
        "model": model,
        "lora_name": fields.text("lora_name", 256),
        "n": 1 if n is None else n,
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "top_k": max(0, fields.integer("top_k", -1, MAX_TOKENS) or 0),
        "seed": fields.integer("seed", -INT64, INT64 - 1),
        "stop": _stop(fields),
        "ignore_eos": fields.boolean("ignore_eos", False),
        "stream": stream,
        "include_usage": options is not None and options.boolean("include_usage", False),
        "cache_salt": fields.text("cache_salt", MAX_KEY_CHARS),
        "prompt_cache_key": fields.text("prompt_cache_key", MAX_KEY_CHARS),
        "prompt_ref": fields.text("prompt_ref", 256),
        "disable_spec_decode": fields.boolean("disable_spec_decode", False),
        "save_system_prompt_kv_cache": fields.boolean("save_system_prompt_kv_cache", False),
    }


def _stop(fields: Body) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops)
    ):
        raise fields.fault("stop", f"a string or at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def _messages(fields: Body) -> tuple[dict[str, Any], ...]:
    value = fields.raw("messages")
    if not isinstance(value, list) or not value:
        raise fields.fault("messages", "a list of at least one message")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(value))


def _message(value: Any, path: str) -> dict[str, Any]:
    """Return a message with string role and content; ``name`` and ``tool_call_id`` pass through."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} must be an object with role and content.", param=path)
    fields = Body(value, f"{path}.")
    role = fields.raw("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise fields.fault("role", f"one of {', '.join(_ROLES)}")
    for name in ("tool_calls", "function_call", "audio"):
        fields.refuse_unless(name, [])
    message: dict[str, Any] = {"role": _ROLES[role], "content": _content(fields, role)}
    for name in ("name", "tool_call_id"):
        text = fields.text(name, MAX_KEY_CHARS)
        if text is not None:
            message[name] = text
    return message


def _content(fields: Body, role: str) -> str:
    """Return the text of a message; text parts are joined as they are, with nothing between them."""
    value = fields.raw("content")
    if isinstance(value, str):
        return value
    if value is None and role == "assistant":
        return ""
    if not isinstance(value, list):
        raise fields.fault("content", "a string or a list of text parts")
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise fields.fault("content", 'text only: a string, or parts like {"type": "text", "text": "..."}')
        if not isinstance(part.get("text"), str):
            raise fields.fault("content", 'made of parts whose "text" is a string')
        texts.append(part["text"])
    return "".join(texts)


def _prompts(fields: Body) -> tuple[Prompt, ...]:
    value = fields.raw("prompt")
    if isinstance(value, str) or (isinstance(value, list) and value and not isinstance(value[0], str | list)):
        value = [value]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PROMPTS:
        raise fields.fault("prompt", f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either")
    return tuple(_prompt(fields, prompt) for prompt in value)


def _prompt(fields: Body, value: Any) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise fields.fault("prompt", "text that is not empty")
        return value
    if (
        not isinstance(value, list)
        or not value
        or not all(type(token_id) is int and 0 <= token_id <= MAX_TOKENS for token_id in value)
    ):
        raise fields.fault("prompt", "strings that are not empty, or lists of at least one token id")
    return tuple(value)
