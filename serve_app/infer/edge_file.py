"""TensorRT Edge-LLM's file of requests -> chat requests; and its forms of answers and of a profile.

Its fields and their defaults. What is inside a message, and the bounds of values, is what the chat API says.
Source: the input format and the examples' outputs of TensorRT Edge-LLM.
"""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field

from serve_app.api.json_body import JsonBody, Must, Whole
from serve_app.batch.batch_file import BatchRequest
from serve_app.errors import InvalidRequest
from serve_app.infer.answered import AnsweredLine

DEFAULT_MAX_GENERATE_LENGTH = 256
MAX_BATCH_SIZE = 4096
_REQUEST_FIELDS = frozenset({"messages", "lora_name", "save_system_prompt_kv_cache", "disable_spec_decode", "stop"})
_CHAT = "/v1/chat/completions"


class _File(JsonBody):
    """The outermost object. Its sampling values are checked with each request, as the chat API checks them."""

    bounded: ClassVar[Mapping[str, int]] = {"requests": 1 << 26}

    requests: Annotated[
        list[Annotated[dict[str, Any], Must("an object with messages")]],
        Field(min_length=1),
        Must("a list of at least one request"),
    ]
    batch_size: Annotated[
        int, Field(ge=1, le=MAX_BATCH_SIZE), Whole, Must(f"a whole number from 1 to {MAX_BATCH_SIZE}")
    ] = 1
    temperature: Any = 1.0
    top_p: Any = 0.8
    top_k: Any = 50
    max_generate_length: Any = None
    apply_chat_template: bool = True
    add_generation_prompt: bool = True
    enable_thinking: bool = False
    available_lora_weights: Annotated[
        dict[str, Annotated[str, Field(min_length=1)]], Must("an object of adapters' names and paths")
    ] = Field({})


@dataclass(frozen=True, slots=True)
class EdgeFile:
    """A file. ``adapters``: paths by name; ``unread``: names of fields that nothing reads, for a warning."""

    path: Path
    requests: list[BatchRequest]
    batch_size: int
    adapters: dict[str, Path]
    unread: tuple[str, ...]

    def responses(self, answered: Sequence[AnsweredLine]) -> dict[str, Any]:
        """Return the output. ``answered``: in the order of the file."""
        return {"input_file": str(self.path), "responses": [self._response(*one) for one in enumerate(answered)]}

    def _response(self, index: int, one: AnsweredLine) -> dict[str, Any]:
        said, body = one.line["response"], one.line["response"]["body"]
        ok = said["status_code"] == 200
        choice = body["choices"][0] if ok else {}
        return {
            "output_text": choice["message"]["content"] if ok else error_of(body),
            "request_idx": index,
            "batch_idx": index // self.batch_size,
            "finish_reason": choice["finish_reason"] if ok else "error",
            "messages": self.requests[index].body.get("messages"),
            "formatted_system_prompt": one.formatted_system_prompt,
            "formatted_complete_request": one.formatted_request,
        }


def error_of(body: dict[str, Any]) -> str:
    """Return an error's message, in the words of Edge-LLM's file."""
    return str(body["error"]["message"]).replace("max_tokens", "max_generate_length")


def read_edge_file(path: Path, text: bytes) -> EdgeFile | None:
    """Return the file of a text, None if it is no object with ``requests``. Raises InvalidRequest."""
    try:
        fields = msgspec.json.decode(text.removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError):  # lines, perhaps
        return None
    if not isinstance(fields, dict) or "requests" not in fields:
        return None
    file = _File.checked({name: value for name, value in fields.items() if value is not None})
    given = {
        "temperature": file.temperature,
        "top_p": file.top_p,
        "top_k": file.top_k,
        "max_tokens": file.max_generate_length,
        "apply_chat_template": file.apply_chat_template,
        "add_generation_prompt": file.add_generation_prompt,
        "chat_template_kwargs": {"enable_thinking": True} if file.enable_thinking else None,
        "reasoning_effort": None if file.enable_thinking else "none",
    }
    given = {name: value for name, value in given.items() if value is not None}
    requests, unread = [], [*(file.model_extra or ())]
    for index, request in enumerate(file.requests):
        fields = {name: value for name, value in request.items() if name in _REQUEST_FIELDS and value not in (None, "")}
        unread += (f"requests[].{name}" for name in request if name not in _REQUEST_FIELDS)
        line = {"custom_id": str(index), "url": _CHAT, "body": {"seed": index, **given, **fields}}
        requests.append(BatchRequest.checked(line))
    adapters = {
        name: path.absolute().parent / Path(at).expanduser() for name, at in file.available_lora_weights.items()
    }
    missing = [one.body["lora_name"] for one in requests if one.body.get("lora_name", None) not in (None, *adapters)]
    if missing:
        raise InvalidRequest(
            f"lora_name {missing[0]!r} is not in available_lora_weights ({', '.join(adapters) or 'which is empty'}).",
            param="lora_name",
        )
    return EdgeFile(path, requests, file.batch_size, adapters, tuple(dict.fromkeys(unread)))
